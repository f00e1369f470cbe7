"""The ServerApp that a run's bundle names. The rounds are run by the process that submitted it, `fedcomp server start`."""

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    raise RuntimeError(
        "this run belongs to the process that submitted it; start one with: fedcomp server start"
    )
