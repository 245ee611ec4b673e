"""On NVIDIA the op's second call of a shape repeats its launches by addresses. No GPU: what is launched is recorded and
held against the launches of a call that binds everything anew."""

from __future__ import annotations

import pytest
import torch

from mindspeed_kda.contracts import wy_dqkg
from mindspeed_kda.testing.inputs import wy_inputs

triton = pytest.importorskip("triton")

from mindspeed_kda.npu_kernels import launch as launching  # noqa: E402
from mindspeed_kda.npu_kernels.wy_dqkg import plan  # noqa: E402

STREAM = 7
LARGEST_SIZE = 2**16
"""No number of these calls is larger, and no address smaller."""


class Recorder:
    """Stands in for Triton: kernels bound by name, and compiled ones launched by position."""

    def __init__(self):
        self.bound, self.repeated = [], []

    def bind(self, kernel, grid, values):
        self.bound.append((kernel.fn.__name__, values))
        return Compiled(self, kernel)

    def clear(self):
        self.bound.clear()
        self.repeated.clear()


class Compiled:
    def __init__(self, recorder, kernel):
        self.recorder, self.kernel = recorder, kernel

    def __getitem__(self, grid):
        def run(*values, stream=None):
            found = self.recorder.bound if stream is None else self.recorder.repeated
            found.append((self.kernel.fn.__name__, dict(zip(self.kernel.arg_names, values, strict=True))))
            assert stream in (None, STREAM)

        return run


@pytest.fixture
def recorder(monkeypatch):
    made = Recorder()
    monkeypatch.setattr(
        triton.runtime.jit.JITFunction, "run", lambda self, *, grid, warmup, **kw: made.bind(self, grid, kw)
    )
    monkeypatch.setattr(launching, "cores", lambda kind, index: launching.Cores(cube=8, vector=8))
    monkeypatch.setattr(launching, "current_stream", lambda device: STREAM)
    monkeypatch.setattr(launching, "_COMPILED", {})
    monkeypatch.setattr(plan, "_REPEATED", {})
    for module in (launching, plan):
        monkeypatch.setattr(module, "repeats", lambda device: True)
    return made


def inputs(seed=0, **changed):
    sizes = {"T": 40, "H": 2, "HV": 4, "K": 16, "V": 32, "BT": 16, "dtype": torch.float16}
    return wy_inputs(**sizes | changed, seed=seed)


def call_of(kwargs):
    return wy_dqkg.check(**kwargs)


def labelled(launches, call, out):
    """The launches with each tensor by its name, and each place in the workspace by its distance from the first."""
    known = {t.data_ptr(): n for n in (*plan.INPUTS, "cu_seqlens") if (t := getattr(call, n)) is not None}
    known |= {t.data_ptr(): f"out.{n}" for n, t in out._asdict().items()}
    places = {}
    for _, values in launches:
        for name, value in values.items():
            if torch.is_tensor(value):
                value = value.data_ptr()
            if name != "chunk_indices" and isinstance(value, int) and value > LARGEST_SIZE and value not in known:
                places[value] = name
    base = min(places)
    known |= {at: f"workspace + {at - base}" for at in places}
    return [
        (kernel, {n: known.get(a := v.data_ptr() if torch.is_tensor(v) else v, a) for n, v in values.items()})
        for kernel, values in launches
    ]


@pytest.mark.parametrize("lengths", [None, [20, 0, 5]], ids=["dense", "packed"])
@pytest.mark.parametrize("state_v_first", [False, True])
def test_a_second_call_makes_the_launches_of_the_first_on_its_own_tensors(
    recorder, monkeypatch, lengths, state_v_first
):
    first = call_of(inputs(lengths=lengths, state_v_first=state_v_first))
    plan.run(first)
    assert len(recorder.bound) == 6 + (lengths is not None)
    recorder.clear()
    call = call_of(inputs(seed=1, lengths=lengths, state_v_first=state_v_first) | {"scale": 0.3})
    out = plan.run(call)
    assert not recorder.bound
    got = labelled(recorder.repeated, call, out)
    recorder.clear()
    monkeypatch.setattr(plan, "repeats", lambda device: False)
    out = plan.run(call)
    expected = labelled(recorder.bound, call, out)
    for launches in (got, expected):  # made anew by each call
        for _, values in launches:
            values.pop("chunk_indices", None)
    assert got == expected
    assert [values["scale"] for _, values in got if "scale" in values] == [0.3]


@pytest.mark.parametrize("beta_dtype", [torch.float32, torch.float16])
def test_beta_and_db_pass_through_the_workspace(recorder, monkeypatch, beta_dtype):
    """The kernels of the repeated call see beta turned to rows by head, and what they leave as db comes back turned."""
    plan.run(call_of(inputs(B=2)))
    kwargs = inputs(B=2, seed=1, beta_dtype=beta_dtype)
    call = call_of(kwargs)
    seen, tensors, empty = {}, [], torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **kw: tensors.append(empty(*a, **kw)) or tensors[-1])
    rows = call.B * call.T

    def repeat(launches, values, device):
        workspace = tensors[-1]
        for name in ("beta_t", "db_t"):
            at = (values[name] - workspace.data_ptr()) // 4
            seen[name] = workspace[at : at + rows * call.HV].view(call.HV, rows)
        if launches:
            seen["beta"] = seen["beta_t"].clone()
            seen["db_t"].copy_(torch.arange(rows * call.HV).view(call.HV, rows))

    monkeypatch.setattr(plan, "repeat", repeat)
    out = plan.run(call)
    assert torch.equal(seen["beta"], kwargs["beta"].float().reshape(rows, call.HV).t())
    assert torch.equal(out.db.reshape(rows, call.HV), torch.arange(rows * call.HV).view(call.HV, rows).t().float())


def shifted(kwargs, name):
    t = kwargs[name]
    buffer = torch.empty(t.numel() + 1, dtype=t.dtype)
    buffer[1:] = t.reshape(-1)
    return kwargs | {name: buffer[1:].view(t.shape)}


def turned(kwargs, name):
    return kwargs | {name: kwargs[name].transpose(1, 2).contiguous().transpose(1, 2)}


@pytest.mark.parametrize("change", [shifted, turned])
@pytest.mark.parametrize("name", plan.INPUTS)
def test_other_strides_and_alignment_bind_anew_and_leave_nothing_for_others(recorder, change, name):
    plan.run(call_of(change(inputs(), name)))
    assert not plan._REPEATED
    plan.run(call_of(inputs()))
    recorder.clear()
    plan.run(call_of(change(inputs(), name)))
    assert len(recorder.bound) == 6
    assert not recorder.repeated


@pytest.mark.parametrize(
    "changed",
    [
        {"B": 2}, {"T": 41}, {"T": 70}, {"H": 1}, {"HV": 2}, {"K": 32}, {"V": 16}, {"BT": 32},
        {"dtype": torch.float32}, {"state_dtype": torch.float16}, {"state_v_first": True}, {"lengths": [40]},
        {"lengths": [8, 32]}, {"lengths": [40], "cu_dtype": torch.int64},
    ],
    ids=str,
)  # fmt: skip
def test_another_call_is_bound_anew(recorder, changed):
    plan.run(call_of(inputs()))
    plan.run(call_of(inputs(lengths=[17, 23])))
    recorder.clear()
    plan.run(call_of(inputs(**changed)))
    assert not recorder.repeated
    plan.run(call_of(inputs(**changed)))
    assert len(recorder.repeated) >= 6


def test_what_is_known_of_calls_is_bounded(recorder, monkeypatch):
    monkeypatch.setattr(plan, "MOST_REPEATED", 2)
    for T in (17, 33, 49):
        plan.run(call_of(inputs(T=T)))
        assert len(plan._REPEATED) <= 2
    assert len(plan._REPEATED) == 1
