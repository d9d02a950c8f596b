"""Ask the planner "what if": a faster network, more memory, one more machine.

python examples/03_what_would_help.py
"""

import argosy

OFFICE = """
name = "office"

[[nodes]]
name = "a"
count = {a}
devices = {{ kind = "A100-40GB", count = 4 }}
intra = [{{ medium = "nvlink", bandwidth = "300 GB/s", latency = "3 us" }}]
nic = {{ bandwidth = "{nic} Gbit/s", latency = "20 us" }}

[[nodes]]
name = "v"
count = 1
devices = {{ kind = "{v}", count = 4 }}
intra = [{{ medium = "nvlink", bandwidth = "150 GB/s", latency = "3 us" }}]
nic = {{ bandwidth = "{nic} Gbit/s", latency = "20 us" }}
"""


def seconds(**choice: object) -> float:
    from pathlib import Path
    from tempfile import TemporaryDirectory

    with TemporaryDirectory() as folder:
        file = Path(folder) / "office.toml"
        file.write_text(OFFICE.format(**({"a": 1, "nic": 10, "v": "V100-16GB"} | choice)))
        plan = argosy.find_plan(
            argosy.load_model("llama-2-7b", sequence_length=2048, dtype="fp16"),
            argosy.load_cluster(file),
            global_batch=64,
        )
    assert plan.predicted is not None
    return plan.predicted.iteration_seconds


now = seconds()
print(f"as it is                    {now:6.2f} s")
for what, choice in {
    "100 Gbit/s network": {"nic": 100},
    "V100 with 32 GB": {"v": "V100-32GB"},
    "one more node of A100": {"a": 2},
}.items():
    then = seconds(**choice)
    print(f"{what:27} {then:6.2f} s, {now / then:.2f} times as fast")
