"""CallbackList: every callback receives every call. A failing callback is reported and removed, and does not end the run."""

import inspect

import pytest
from cases import for_each
from example_records import HEADER

from fedcomp.callbacks import (
    Callback,
    CallbackList,
    ForwardingCallback,
    LogMessage,
    Summary,
)

HOOKS = [name for name, value in vars(Callback).items() if inspect.isfunction(value)]
ARGUMENTS = {
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


class RecordingCallback(Callback):
    """Records the calls of its hooks, and raises an error in the hook `fails_at`."""

    def __init__(self, fails_at=""):
        self.calls, self.fails_at = [], fails_at

    def __getattribute__(self, name):
        if name not in HOOKS:
            return super().__getattribute__(name)
        return lambda *values: self.record(name, values)

    def record(self, name, values):
        if name == self.fails_at:
            raise OSError(28, "No space left on device")
        self.calls.append((name, values))


@for_each("hook", HOOKS)
def test_every_callback_receives_every_call(hook):
    first, one, two = RecordingCallback(), RecordingCallback(), RecordingCallback()
    both = CallbackList(first, {"one": one, "two": two})
    assert hook in vars(ForwardingCallback), "ForwardingCallback does not forward this hook"
    getattr(both, hook)(*ARGUMENTS[hook])
    assert first.calls == one.calls == two.calls == [(hook, ARGUMENTS[hook])]


def test_the_table_above_names_every_hook():
    assert set(ARGUMENTS) == set(HOOKS) and Summary


def test_a_failing_callback_is_reported_once_and_removed():
    first, bad, good = (
        RecordingCallback(),
        RecordingCallback(fails_at="on_client_joined"),
        RecordingCallback(),
    )
    both = CallbackList(first, {"--log-json x": bad, "good": good})
    both.on_client_left(0)
    both.on_client_joined(1)
    both.on_client_left(1)
    expected = (
        "on_warning",
        ("--log-json x has failed (No space left on device); the run continues without it",),
    )
    assert first.calls == [
        ("on_client_left", (0,)),
        ("on_client_joined", (1,)),
        expected,
        ("on_client_left", (1,)),
    ]
    assert bad.calls == [("on_client_left", (0,))] and sorted(good.calls) == sorted(first.calls)


def test_every_callback_but_the_first_may_fail():
    first = RecordingCallback()
    both = CallbackList(
        first, {"a": RecordingCallback("on_warning"), "b": RecordingCallback("on_warning")}
    )
    both.on_warning("odd")
    assert [sentence for _, (sentence,) in first.calls if sentence == "odd"] == ["odd"]
    assert len(first.calls) == 3 and not both.others
    with pytest.raises(OSError):
        CallbackList(RecordingCallback("on_warning"), {}).on_warning("odd")


def test_the_header_has_the_address_of_the_metrics_page_behind_nested_lists():
    first = RecordingCallback()
    CallbackList(CallbackList(first, {}), {}, "http://127.0.0.1:1/metrics").on_run_start(HEADER)
    assert first.calls[0][1][0].metrics == "http://127.0.0.1:1/metrics"


def test_a_log_message_equals_its_text():
    message = LogMessage("round 3", "answered", round=3)
    assert (
        message == "round 3"
        and f"{message}!" == "round 3!"
        and (message.event, message.values) == ("answered", {"round": 3})
    )
