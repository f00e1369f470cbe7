"""Deployments that run in Flower's own processes: `--transport flower` of `fedcomp server start` and `fedcomp client`.

A Flower App consists of a ServerApp and a ClientApp. `fedcomp server start` starts Flower's server program `flower-superlink`, submits an
App whose ServerApp runs the rounds, and displays their progress. The App contains no code. It only names modules of fedcomp, which must be
installed on the server and on each client. `fedcomp client` starts Flower's client program `flower-supernode`, which runs the ClientApp.
The ClientApp stores the client's state in the client's state folder.
"""
