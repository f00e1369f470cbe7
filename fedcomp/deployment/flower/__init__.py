"""Deployments that run in Flower's own processes: `--transport flower` of `fedcomp server start` and `fedcomp client`.

`fedcomp server start` starts `flower-superlink` and submits a Flower App, whose ServerApp runs the rounds. The server command displays
their progress. The App contains no code: it names installed modules of fedcomp. `fedcomp client` starts `flower-supernode`, in which the
App's ClientApp runs. The ClientApp stores its state in the client's state folder.
"""
