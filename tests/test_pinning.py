"""How parameters move into page-locked memory: slab by slab, the next ones being locked meanwhile."""

from __future__ import annotations

import mmap
import threading

import pytest
import torch
from torch import nn

from fxoffload.effects import Tier
from fxoffload.errors import PlanError
from fxoffload.places import Places
from fxoffload.runtime import host_memory
from fxoffload.runtime.host_memory import HostMemory
from fxoffload.runtime.slabs import Slab

pytestmark = pytest.mark.unit


class Locks:
    """Stands for the driver: slabs of plain memory, with what was locked, by which thread, and what was unlocked. Refuses slab `refused`."""

    def __init__(self, refused: int = -1) -> None:
        self.sizes: list[int] = []
        self.threads: set[int] = set()
        self.n_unlocked = 0
        self._refused, self._lock = refused, threading.Lock()

    def slab(self, n_bytes: int) -> Slab:
        with self._lock:
            self.sizes.append(n_bytes)
            self.threads.add(threading.get_ident())
            if len(self.sizes) - 1 == self._refused:
                raise PlanError("cannot pin")
        return Slab(mmap.mmap(-1, n_bytes), self._unlock)

    def _unlock(self) -> None:
        self.n_unlocked += 1


def pinning(monkeypatch: pytest.MonkeyPatch, locks: Locks) -> HostMemory:
    monkeypatch.setattr(host_memory, "pinned_slab", locks.slab)
    monkeypatch.setattr(host_memory, "MOVED_BYTES", 1 << 14)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    return HostMemory(pin=True)


def weights(n: int) -> list[torch.Tensor]:
    """Of 6000 bytes each, two pages: two make a slab."""
    return [torch.full((1500,), float(i)) for i in range(n)]


def test_never_more_than_a_few_slabs_are_locked_ahead_of_what_was_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    locks, src = Locks(), weights(60)
    memory, ahead = pinning(monkeypatch, locks), []
    moved = []
    for i, housed in enumerate(memory.pinned_ahead(src)):
        moved.append(housed.copy_(src[i]))
        ahead.append(len(locks.sizes) - (i // 2 + 1))
    assert 0 < max(ahead) <= host_memory._AHEAD
    assert all(map(torch.equal, moved, src)) and sum(locks.sizes) == 60 * 8192 and threading.get_ident() not in locks.threads
    assert memory.live_bytes[Tier.PINNED] == 60 * 6000 and all(map(memory.owns, moved))
    memory.close()
    assert locks.n_unlocked == len(locks.sizes) == 30


def test_a_weight_larger_than_a_slab_has_one_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    locks = Locks()
    found = list(pinning(monkeypatch, locks).pinned_ahead([torch.zeros(10), torch.zeros(100_000), torch.zeros(10)]))
    assert [one.numel() for one in found] == [10, 100_000, 10] and sorted(locks.sizes) == [4096, 4096 + 401_408]


def test_a_refused_lock_is_raised_and_what_was_locked_ahead_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    locks = Locks(refused=1)
    memory = pinning(monkeypatch, locks)
    with pytest.raises(PlanError, match="cannot pin"):
        for _ in memory.pinned_ahead(weights(60)):
            pass
    memory.close()
    assert locks.n_unlocked == len(locks.sizes) - 1


def test_a_model_moves_into_pinned_memory_as_it_is_and_no_thread_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    locks, model = Locks(), nn.Sequential(*(nn.Linear(60, 60) for _ in range(6)))
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    memory = pinning(monkeypatch, locks)
    Places(model, torch.device("cpu")).house(dict.fromkeys(before, Tier.PINNED), memory)
    assert all(torch.equal(parameter, before[name]) and memory.owns(parameter) for name, parameter in model.named_parameters())
    assert len(locks.sizes) > 2 and not [t for t in threading.enumerate() if t.name.startswith("fxoffload-pin")]


def test_memory_that_is_needed_meanwhile_is_locked_by_a_thread_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The asking thread's work may be being recorded (cudaStreamCaptureModeThreadLocal), when it may lock no pages."""
    locks = Locks()
    memory = pinning(monkeypatch, locks)
    there = memory.empty_like(torch.ones(4), Tier.PINNED)
    assert there.shape == (4,) and len(locks.sizes) == 1 and locks.threads.isdisjoint({threading.get_ident()})
    refusing = pinning(monkeypatch, Locks(refused=0))
    with pytest.raises(PlanError, match="cannot pin"):
        refusing.empty_like(torch.ones(4), Tier.PINNED)
    memory.close()
