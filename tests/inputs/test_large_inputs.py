"""Inputs of a megabyte that took minutes or for ever: each ends in one sentence, or in an answer,
at once.

Nothing here is timed. Before they were mended, these ran for minutes; a test that hangs fails in
the suite.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from argosy.cli import main
from argosy.cli.terminal import write_file
from argosy.cluster.file import load_cluster
from argosy.document import read_text
from argosy.errors import MOST_PROBLEMS, InputError
from argosy.plan.file import load_plan
from argosy.report.clusters import link_table
from argosy.runtime.state.reading import read_weights

NODE = 'name = "x"\n[[nodes]]\nname = "a"\ncount = 1000\ndevices = { kind = "T4" }\nnic = { bandwidth = "1 GB/s" }\n'
DEEP = "tables are nested too deeply"
LARGE: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "a key of many parts": (load_cluster, "a" + ".a" * 500_000 + " = 1\n", DEEP),
    "a quoted key of many parts": (load_cluster, "'a'" + '."a"' * 250_000 + " = 1\n", DEEP),
    "a table of many parts": (load_cluster, "[a" + ".a" * 500_000 + "]\n", DEEP),
    "inline tables": (load_cluster, "a = " + "{a = " * 150_000 + "1" + "}" * 150_000 + "\n", DEEP),
    "objects": (load_plan, '{"a":' * 150_000 + "1" + "}" * 150_000, DEEP),
    "wrong hosts": (load_cluster, f"{NODE}hosts = [{'1,' * 100_000}]\n", "99900 more problems"),
    "wrong nodes": (
        load_cluster,
        f'name = "x"\nnodes = [{"1," * 100_000}]\n',
        "99900 more problems",
    ),
    "changes of all links": (
        load_cluster,
        NODE + '[[changes]]\nlink = "*"\nsteps = [["1 s", "1 GB/s"]]\n' * 10_000,
        "found 101000, expected at most 100000 edges and devices",
    ),
    "switches above one another": (
        load_cluster,
        NODE
        + "".join(
            f'[[switches]]\nname = "s{at}"\nparent = "s{at + 1}"\nuplink = {{ bandwidth = "1 GB/s" }}\n'
            for at in range(3000)
        ),
        "at most 64 switches above one another",
    ),
}


@pytest.mark.parametrize("name", LARGE)
def test_a_large_file_is_answered(name: str, tmp_path: Path) -> None:
    read, text, message = LARGE[name]
    path = tmp_path / f"input.{'json' if read is load_plan else 'toml'}"
    path.write_text(text)
    with pytest.raises(InputError) as refused:
        read(path)
    assert message in str(refused.value)
    assert len(refused.value.problems) <= MOST_PROBLEMS + 1


def test_a_long_trace_that_many_links_follow_is_refused(tmp_path: Path) -> None:
    rows = "".join(f"{at},1 GB/s\n" for at in range(10_001))
    (tmp_path / "long.csv").write_text(f"seconds,bandwidth\n{rows}")
    path = tmp_path / "cluster.toml"
    path.write_text(f'{NODE}[[changes]]\nlink = "a*.nic"\ntrace = "long.csv"\n')
    with pytest.raises(
        InputError, match="found 10001000, expected at most 10,000,000 values of traces"
    ):
        load_cluster(path)


def test_dots_that_are_no_key_are_read(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(f"# {'a.' * 500}\n{NODE}[[kinds]]\nname = 'k'\nsource = \"{'a.' * 500}\"\nmemory = '1 GB'\n"
                    "memory_bandwidth = '1 GB/s'\nflops = { fp32 = '1 TFLOP/s' }\n")  # fmt: skip
    assert len(load_cluster(path).nodes) == 1000


def test_a_named_pipe_is_no_file(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe.toml"
    os.mkfifo(pipe)
    with pytest.raises(InputError, match=r"pipe.toml: found a named pipe, expected a file"):
        read_text(pipe)
    with pytest.raises(InputError, match="because nobody reads this named pipe"):
        write_file(pipe, b"text")
    received: list[bytes] = []
    reader = threading.Thread(target=lambda: received.append(pipe.read_bytes()))
    reader.start()
    while reader.is_alive():
        try:
            write_file(pipe, b"text")
            break
        except InputError:
            continue  # the reader has not opened it yet
    reader.join()
    assert received == [b"text"]


def test_weights_are_not_read_from_a_named_pipe(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pipe, program = tmp_path / "weights.pt", tmp_path / "train.py"
    os.mkfifo(pipe)
    program.write_text("def build(): ...\n")
    with pytest.raises(InputError, match=r"weights.pt: found a named pipe, expected a file"):
        read_weights(pipe)
    plan = "gpt2-xl-on-two-cards"
    command = ["run", plan, str(program), "--out", str(tmp_path / "out"), "--steps", "1"]
    with pytest.raises(SystemExit) as stop:
        main([*command, "--init", str(pipe), "--any-device"])
    assert stop.value.code == 2
    assert "weights.pt: found a named pipe, expected a file" in capsys.readouterr().err


def test_a_pipe_of_the_shell_is_read(tmp_path: Path) -> None:
    source, sink = os.pipe()
    os.write(sink, b"text")
    os.close(sink)
    assert read_text(f"/dev/fd/{source}") == "text"
    os.close(source)


@pytest.mark.parametrize("option", [("--workers", "1000000"), ("--width", "1000000000")])
def test_numbers_beyond_any_machine_are_refused(
    option: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["plan", "-m", "gpt2", "-c", "two-cards", "-b", "8", *option])
    assert stop.value.code == 2
    assert option[0] in capsys.readouterr().err


def test_links_of_many_nodes_are_listed_in_linear_time(tmp_path: Path) -> None:
    path = tmp_path / "many.toml"
    path.write_text(NODE.replace("1000", "10000"))
    cluster = load_cluster(path)
    begin = time.process_time()
    assert link_table(cluster).row_count == 0
    assert time.process_time() - begin < 1.0, "it took 4 s when it was quadratic"


def test_a_model_of_too_many_layers_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = '{"model_type": "gpt2", "n_layer": 2000, "n_embd": 8, "n_head": 1, "vocab_size": 9, "n_positions": 8}'
    path = tmp_path / "deep.json"
    path.write_text(config)
    with pytest.raises(SystemExit) as stop:
        main(["plan", "-m", str(path), "-c", "two-cards", "-b", "8"])
    assert stop.value.code == 2
    assert "layers: found 2002, expected at most 2,000 layers" in capsys.readouterr().err
