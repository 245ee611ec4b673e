"""Timing: medians that follow the work, and a copy speed in bytes read plus written."""

import time

import torch

from mindspeed_kda.testing import timing


def test_median_follows_the_work():
    slow = timing.median_time(lambda: time.sleep(0.01), "cpu", warmup=1, min_calls=3, max_calls=3)
    assert 0.01 <= slow.low <= slow.median <= slow.high < 0.1
    assert slow.calls == 3


def test_calls_fit_the_budget():
    calls = []
    found = timing.median_time(lambda: calls.append(time.sleep(0.005)), "cpu", warmup=2, budget=0.05, max_calls=50)
    assert 5 <= found.calls <= 10
    assert len(calls) == found.calls + 3  # two warm-up calls and the one that measures how many fit


def test_copy_speed_counts_both_directions(monkeypatch):
    monkeypatch.setattr(timing, "median_time", lambda fn, device, **kw: timing.Timing(2.0, 2.0, 2.0, 1))
    assert timing.copy_speed("cpu", nbytes=1024) == 1024.0


def test_device_name():
    assert timing.device_name(torch.device("cpu")).startswith("cpu")
