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
    "on_port_open": (lambda: None,),
    "on_run_start": (HEADER,),
    "on_waiting": ([1], 2),
    "on_client_joined": (1,),
    "on_client_left": (1,),
    "on_progress": (1, 2, 3),
    "on_round_end": (object(),),
    "on_checkpoint": (3, 0.5),
    "on_warning": ("odd",),
    "on_run_end": (object(), "runs/x"),
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
    first, bad, good = Hears(), Hears(fails="on_client_joined"), Hears()
    both = CallbackList(first, {"--log-json x": bad, "good": good})
    both.on_client_left(0)
    both.on_client_joined(1)
    both.on_client_left(1)
    told = (
        "on_warning",
        ("--log-json x has failed (No space left on device); the run continues without it",),
    )
    assert first.heard == [
        ("on_client_left", (0,)),
        ("on_client_joined", (1,)),
        told,
        ("on_client_left", (1,)),
    ]
    assert bad.heard == [("on_client_left", (0,))] and sorted(good.heard) == sorted(first.heard)


def test_all_may_fail_but_the_first():
    first = Hears()
    both = CallbackList(first, {"a": Hears("on_warning"), "b": Hears("on_warning")})
    both.on_warning("odd")
    assert [said for _, (said,) in first.heard if said == "odd"] == ["odd"]
    assert len(first.heard) == 3 and not both.others
    with pytest.raises(OSError):
        CallbackList(Hears("on_warning"), {}).on_warning("odd")


def test_the_header_says_where_metrics_are_read_whoever_stands_between():
    first = Hears()
    CallbackList(CallbackList(first, {}), {}, "http://127.0.0.1:1/metrics").on_run_start(HEADER)
    assert first.heard[0][1][0].metrics == "http://127.0.0.1:1/metrics"


def test_what_is_said_is_its_sentence():
    said = LogMessage("round 3", "answered", round=3)
    assert (
        said == "round 3"
        and f"{said}!" == "round 3!"
        and (said.event, said.values) == ("answered", {"round": 3})
    )
