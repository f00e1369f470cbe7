"""Several callbacks as one: all hear everything, and one that fails neither ends the run nor fails unheard."""

import inspect

import pytest
from cases import for_each

from fedcomp.callbacks import (
    Callback,
    CallbackList,
    ForwardingCallback,
    Header,
    LogMessage,
    Summary,
)

HOOKS = [name for name, value in vars(Callback).items() if inspect.isfunction(value)]
HEADER = Header(
    "t", 3, 2, 10, "average", "stc", "stc", "none", "iid", "cpu", "serial", 1, 9, "runs/x"
)
SAID = {
    "serving": (lambda: None,),
    "started": (HEADER,),
    "waiting": ([1], 2),
    "joined": (1,),
    "left": (1,),
    "progress": (1, 2, 3),
    "round_done": (object(),),
    "checkpoint": (3, 0.5),
    "warning": ("odd",),
    "finished": (object(), "runs/x"),
}


class Hears(Callback):
    """Writes down what it hears; fails at `fails`."""

    def __init__(self, fails=""):
        self.heard, self.fails = [], fails

    def __getattribute__(self, name):
        if name not in HOOKS:
            return super().__getattribute__(name)
        return lambda *said: self.hear(name, said)

    def hear(self, name, said):
        if name == self.fails:
            raise OSError(28, "No space left on device")
        self.heard.append((name, said))


@for_each("hook", HOOKS)
def test_all_hear_every_word(hook):
    first, one, two = Hears(), Hears(), Hears()
    both = CallbackList(first, {"one": one, "two": two})
    assert hook in vars(ForwardingCallback), "it is passed on"
    getattr(both, hook)(*SAID[hook])
    assert first.heard == one.heard == two.heard == [(hook, SAID[hook])]


def test_the_table_above_names_every_hook():
    assert set(SAID) == set(HOOKS) and Summary


def test_one_that_fails_is_told_of_once_and_hears_no_more():
    first, bad, good = Hears(), Hears(fails="joined"), Hears()
    both = CallbackList(first, {"--log-json x": bad, "good": good})
    both.left(0)
    both.joined(1)
    both.left(1)
    told = (
        "warning",
        ("--log-json x has failed (No space left on device); the run goes on without it",),
    )
    assert first.heard == [("left", (0,)), ("joined", (1,)), told, ("left", (1,))]
    assert bad.heard == [("left", (0,))] and sorted(good.heard) == sorted(first.heard)


def test_all_may_fail_but_the_first():
    first = Hears()
    both = CallbackList(first, {"a": Hears("warning"), "b": Hears("warning")})
    both.warning("odd")
    assert [said for _, (said,) in first.heard if said == "odd"] == ["odd"]
    assert len(first.heard) == 3 and not both.beside
    with pytest.raises(OSError):
        CallbackList(Hears("warning"), {}).warning("odd")


def test_the_header_says_where_metrics_are_read_whoever_stands_between():
    first = Hears()
    CallbackList(CallbackList(first, {}), {}, "http://127.0.0.1:1/metrics").started(HEADER)
    assert first.heard[0][1][0].metrics == "http://127.0.0.1:1/metrics"


def test_what_is_said_is_its_sentence():
    said = LogMessage("round 3", "answered", round=3)
    assert (
        said == "round 3"
        and f"{said}!" == "round 3!"
        and (said.event, said.values) == ("answered", {"round": 3})
    )
