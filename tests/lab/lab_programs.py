"""What runs inside a lab in these tests, once per device: `python lab_programs.py WHAT`."""

from __future__ import annotations

import os
import socket
import sys
import time

RANK = int(os.environ.get("RANK", "0"))
PORT = 29_000


def receive(seconds: float) -> None:
    """Rank 0 prints the Mbit/s that arrive from each other rank, in turns of a second."""
    with socket.create_server(("", PORT)) as server:
        others = [server.accept()[0] for _ in range(int(os.environ["WORLD_SIZE"]) - 1)]
        began = time.monotonic()
        for turn in range(1, int(seconds) + 1):
            counted = 0
            while (left := began + turn - time.monotonic()) > 0:
                for other in others:
                    other.settimeout(max(left, 1e-3))
                    try:
                        counted += len(other.recv(65536))
                    except TimeoutError:
                        break
            sys.stdout.write(f"{8e-6 * counted:.3f}\n")
            sys.stdout.flush()
        for other in others:
            other.close()


def send() -> None:
    for _ in range(200):
        try:
            connection = socket.create_connection((os.environ["MASTER_ADDR"], PORT))
            break
        except OSError:
            time.sleep(0.02)
    data = bytes(65536)
    try:
        while True:
            connection.sendall(data)
    except OSError:
        return


def spin(seconds: float) -> None:
    """Prints the share of a core that a busy loop gets."""
    from argosy.runtime.processes.emulated import join_device

    join_device()
    began, busy = time.monotonic(), time.thread_time()
    while time.monotonic() < began + seconds:
        pass
    sys.stdout.write(f"{(time.thread_time() - busy) / (time.monotonic() - began):.4f}\n")


if __name__ == "__main__":
    what = sys.argv[1]
    if what == "traffic":
        receive(float(sys.argv[2])) if RANK == 0 else send()
    elif what == "spin":
        spin(float(sys.argv[2]))
    elif what == "fail":
        if RANK == 1:
            sys.exit("rank 1 gives up")
        time.sleep(60)
    elif what == "sleep":
        time.sleep(60)
