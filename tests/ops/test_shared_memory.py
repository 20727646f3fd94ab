"""Where GPUs that lend each other memory meet."""

from __future__ import annotations

from importlib import import_module

from agentinfer.ops.shared_memory import name_group, renumbered

C10D = import_module("torch._C._distributed_c10d")


def test_a_group_is_found_by_its_name() -> None:
    """torch's sums over symmetric memory resolve the name; two groups over one store do not meet."""
    store = C10D.HashStore()
    held = [name_group(store, f"{store}/{i}", i, 2) for i in range(2)]
    found = [C10D._resolve_process_group(f"{store}/{i}") for i in range(2)]
    assert [(group.rank(), group.size()) for group in found] == [(0, 2), (1, 2)]
    held[0][1].set("key", b"0")
    assert found[0].get_group_store().check(["key"])
    assert not found[1].get_group_store().check(["key"])


def test_processes_with_another_past_meet() -> None:
    """C++ numbers what it exchanges by all groups of a process, 5 here and 0 there: both find what the other wrote,
    call by call, and keys of another form stay as they are.
    """
    store = C10D.HashStore()
    held = [renumbered(store) for _ in range(2)]
    first, second = (C10D.PrefixStore("p", own) for own in held)  # C++ calls Python, as in a rendezvous
    for call in range(3):
        for what, old, new in (("Memory", 5 + call, call), ("Memory", 40 + call, 20 + call)):
            first.set(f"{what}/{old}/0", f"a{old}")
            second.set(f"{what}/{new}/1", f"b{new}")
            first.wait([f"{what}/{old}/1"])
            assert first.get(f"{what}/{old}/1") == f"b{new}".encode()
            assert second.get(f"{what}/{new}/0") == f"a{old}".encode()
    first.set("plain", "x")
    first.set("1/2x/3", "y")
    assert store.get("p/plain") == b"x"
    assert second.get("1/2x/3") == b"y"
    assert not first.check(["Memory/99/0"])
