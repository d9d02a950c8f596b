"""A checkpoint outlives a power cut at any moment of its writing, and one that is torn is found and
not loaded."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from runtime.crash_cases import Tree, make, record_saves, states_after
from runtime.rank_pool import RankPool

from argosy.errors import InputError
from argosy.runtime.elastic.origin import newest_base
from argosy.runtime.processes.manifest import facts_of, tear_in, write_manifest
from argosy.runtime.state.checkpoint import read_state_dict

ABOUT = {"steps": 4, "scale": 1.0, "calm": 0, "aliases": {}}


def checkpoint_in(tree: Tree, name: str) -> Tree:
    before = f"checkpoints/{name}/"
    return {
        path.removeprefix(before): value for path, value in tree.items() if path.startswith(before)
    }


def test_a_power_cut_at_any_moment_leaves_a_whole_checkpoint(
    ranks: RankPool, tmp_path: Path
) -> None:
    """The first one, others beside it, the removal of the oldest, and one in the place of another
    of the same step."""
    steps = (1, 2, 3, 3)
    [saves] = ranks(1, record_saves, str(tmp_path / "run"), steps)
    last: Tree = {}
    for step, (before, events, contents, after) in zip(steps, saves, strict=True):
        newest = checkpoint_in(after, f"step-{step:08d}")
        assert {"argosy.json", ".metadata"} < newest.keys()
        kinds = {event[0] for event in events}
        assert kinds >= {"create", "mkdir", "sync", "rename", "sync folder"}
        seen: set[tuple[tuple[str, bytes | None], ...]] = set()
        for done in range(len(events) + 1):
            is_written = done == len(events)
            for state in states_after(before, events, contents, done):
                key = tuple(sorted(state.items()))
                if key not in seen or is_written:
                    seen.add(key)
                    found = newest_in(state, tmp_path / "crashed")
                    assert found == newest or (found == last and not is_written), (
                        step,
                        events[:done],
                    )
        assert len(seen) > 10
        last = newest


def newest_in(state: Tree, root: Path) -> Tree:
    """The checkpoint that a run would go on from."""
    make(state, root)
    path = newest_base(root, []).path
    shutil.rmtree(root, ignore_errors=True)
    return {} if path is None else checkpoint_in(state, path.name)


def written(folder: Path) -> Path:
    folder.mkdir(parents=True)
    for name in (".metadata", "__0_0.distcp", "__1_0.distcp"):
        (folder / name).write_bytes(name.encode())
    write_manifest(folder, ABOUT, {path.name: facts_of(path) for path in folder.iterdir()})
    return folder


def test_one_flipped_bit_is_found_in_any_file(tmp_path: Path) -> None:
    folder = written(tmp_path / "step-00000004")
    assert tear_in(folder) == ""
    for path in folder.iterdir():
        data = path.read_bytes()
        for at in range(len(data)):
            path.write_bytes(data[:at] + bytes([data[at] ^ (1 << at % 8)]) + data[at + 1 :])
            assert tear_in(folder).startswith(path.name), at
            assert tear_in(folder, contents=False) == "" or path.name == "argosy.json"
        path.write_bytes(data)


def test_what_is_missing_or_cut_off_is_named(tmp_path: Path) -> None:
    folder = written(tmp_path / "step-00000004")
    (folder / "__1_0.distcp").write_bytes(b"__1_")
    for contents in (True, False):
        assert tear_in(folder, contents=contents) == "__1_0.distcp has 4 bytes of 12"
    assert [bool(tear_in(folder, part=part, parts=3)) for part in range(3)] == [False, False, True]
    (folder / "__1_0.distcp").unlink()
    assert tear_in(folder) == "__1_0.distcp: No such file or directory"
    (folder / "__1_0.distcp").symlink_to("/dev/zero")
    assert tear_in(folder) == "__1_0.distcp is not a file"
    with pytest.raises(
        InputError,
        match=r"step-00000004: found __1_0\.distcp is not a file, expected a whole checkpoint",
    ):
        read_state_dict(folder)
    (folder / "argosy.json").unlink()
    assert "argosy.json" in tear_in(folder)


def test_a_run_goes_on_from_the_newest_whole_checkpoint_and_names_those_it_skips(
    tmp_path: Path,
) -> None:
    old, torn, newest = (
        written(tmp_path / "checkpoints" / f"step-0000000{step}") for step in (2, 4, 6)
    )
    (torn / ".metadata").write_bytes(b".Metadata")
    (newest / "argosy.json").unlink()
    base = newest_base(tmp_path, [])
    assert (base.kind, base.path, base.step) == ("checkpoint", old, 2)
    assert [path for path, _ in base.skipped] == [newest, torn]
    assert base.skipped[1][1] == ".metadata has other contents than were written"
    (old / "__0_0.distcp").unlink()
    assert newest_base(tmp_path, []).is_lost
