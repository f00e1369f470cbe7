"""A description of a run and the record of a round, for tests of callbacks."""

from fedcomp.callbacks import Header, Rejection, RoundRecord

HEADER = Header(
    task="digits",
    clients=3,
    cohort=2,
    parameters=10,
    strategy="average",
    uplink="stc",
    downlink="identity",
    memory="residual",
    partition="iid",
    device="cpu",
    engine="serial",
    first_round=1,
    rounds=9,
    out="runs/x",
)
RECORD = RoundRecord(
    round=4,
    accuracy=0.5,
    loss=1.25,
    train_loss=2.0,
    cohort=2,
    accepted=1,
    rejected=1,
    uplink_bytes=10,
    downlink_bytes=27,
    dense_uplink_bytes=80,
    dense_downlink_bytes=80,
    seconds=0.3,
    rejections=(Rejection(2, "deadline", "no reply"),),
)
