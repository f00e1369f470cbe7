"""Deployments that run in Flower's own processes: `--transport flower` of `fedcomp server start` and `fedcomp client`.

`fedcomp server start` starts `flower-superlink`, submits a Flower App to it, and displays the progress of the rounds, which the App's
ServerApp runs. The App contains no code: it names installed modules of fedcomp. `fedcomp client` starts `flower-supernode`. The App's
ClientApp runs in the supernode and keeps its state in the client's state folder.
"""
