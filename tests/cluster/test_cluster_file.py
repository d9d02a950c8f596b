"""Cluster files that people get wrong, each with everything that is said about it, and the ways to
load one."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.broken_cases import Case, cases

from argosy.cluster.file import bundled_clusters, cluster_from_content, load_cluster, with_changes
from argosy.cluster.topology import Cluster
from argosy.errors import InfeasibleError, InputError

GOOD = """\
name = "c"

[[nodes]]
name = "a"
count = 2
devices = { kind = "A100-80GB", count = 2 }
intra = [{ medium = "nvlink", bandwidth = "300 GB/s", latency = "3 us" }]
nic = { bandwidth = "100 Gbit/s", latency = "10 us" }

"""

TRACES = {
    "bad.csv": "seconds,bandwidth\n0,4 Gb/s\nx,1 Gbit/s\n",
    "band.csv": "seconds,bandwidth\n0,4 Gbit/s\n",
    "speed.csv": "seconds,speed\n0,1\n",
    "fast.csv": "seconds,speed\n0,500\n",
    "late.csv": "seconds,bandwidth\n1e13,4 Gbit/s\n",
}

EDITED = r"""
## fewer hosts than nodes
- count = 2
+ count = 2
+ hosts = ["gpu01"]
> cluster.toml:6: nodes[0].hosts: found 1, expected 2, one for each of the group's nodes

## the same host twice
- count = 2
+ hosts = ["gpu01", { name = "gpu01", port = 29600 }]
> cluster.toml:5: nodes[0].hosts[1]: found "gpu01", expected a host that no other node has

## a host that a script would take for something else
- count = 2
+ hosts = ["gpu01; reboot", { name = "gpu02", interface = "eth0 $(id)", port = 70000, address = "a b" }]
> cluster.toml:5: nodes[0].hosts[0].name: found "gpu01; reboot", expected a host name of letters, digits, ".", "-"
| and "_"
> cluster.toml:5: nodes[0].hosts[1].address: found "a b", expected a host name or an IP address
> cluster.toml:5: nodes[0].hosts[1].interface: found "eth0 $(id)", expected a network interface such as "eth0"
> cluster.toml:5: nodes[0].hosts[1].port: found 70000, expected a port from 1 to 65535

## a number for a host
- count = 2
+ hosts = [1, "gpu02"]
> cluster.toml:5: nodes[0].hosts[0]: found 1, expected a host name such as "gpu01", or a table such as { name =
| "gpu01", interface = "ib0" }

## misspelt field
- nic = { bandwidth = "100 Gbit/s", latency = "10 us" }
+ nic = { bandwith = "100 Gbit/s", latency = "10 us" }
> cluster.toml:8: nodes[0].nic.bandwidth: expected a value: this field is required
> cluster.toml:8: nodes[0].nic.bandwith: found an unknown field, expected one of the fields bandwidth, count,
| latency; did you mean "bandwidth"?

## bits or bytes
- nic = { bandwidth = "100 Gbit/s", latency = "10 us" }
+ nic = { bandwidth = "100 Gb/s", latency = "10 us" }
> cluster.toml:8: nodes[0].nic.bandwidth: found "100 Gb/s", expected a rate such as "25 Gbit/s"; "Gb/s" could be
| bits or bytes: write "100 Gbit/s" or "100 GB/s"

## bits per second, abbreviated
- nic = { bandwidth = "100 Gbit/s", latency = "10 us" }
+ nic = { bandwidth = "100 Gbps", latency = "10 us" }
> cluster.toml:8: nodes[0].nic.bandwidth: found "100 Gbps", expected a rate such as "25 Gbit/s"; "Gbps" could be
| bits or bytes: write "100 Gbit/s" or "100 GB/s"

## bare number
- nic = { bandwidth = "100 Gbit/s", latency = "10 us" }
+ nic = { bandwidth = 100, latency = "10 us" }
> cluster.toml:8: nodes[0].nic.bandwidth: found 100, expected a rate such as "25 Gbit/s"; a number needs its unit:
| did you mean "100 Gbit/s"?

## size for a rate
- nic = { bandwidth = "100 Gbit/s", latency = "10 us" }
+ nic = { bandwidth = "12.5 GB", latency = "10 us" }
> cluster.toml:8: nodes[0].nic.bandwidth: found "12.5 GB", expected a rate such as "25 Gbit/s"; did you mean "12.5
| GB/s"?

## rate of nothing
- nic = { bandwidth = "100 Gbit/s", latency = "10 us" }
+ nic = { bandwidth = "0 Gbit/s", latency = "10 us" }
> cluster.toml:8: nodes[0].nic.bandwidth: found "0 Gbit/s", expected a rate such as "25 Gbit/s", more than 0

## negative rate
- nic = { bandwidth = "100 Gbit/s", latency = "10 us" }
+ nic = { bandwidth = "-100 Gbit/s", latency = "10 us" }
> cluster.toml:8: nodes[0].nic.bandwidth: found "-100 Gbit/s", expected a rate such as "25 Gbit/s", not negative

## infinite rate
- nic = { bandwidth = "100 Gbit/s", latency = "10 us" }
+ nic = { bandwidth = inf, latency = "10 us" }
> cluster.toml:8: nodes[0].nic.bandwidth: found inf, expected a rate such as "25 Gbit/s"

## rate that is not a number
- nic = { bandwidth = "100 Gbit/s", latency = "10 us" }
+ nic = { bandwidth = "nan Gbit/s", latency = "10 us" }
> cluster.toml:8: nodes[0].nic.bandwidth: found "nan Gbit/s", expected a rate such as "25 Gbit/s"

## rate beyond floats
- nic = { bandwidth = "100 Gbit/s", latency = "10 us" }
+ nic = { bandwidth = "1e999 Gbit/s", latency = "10 us" }
> cluster.toml:8: nodes[0].nic.bandwidth: found "1e999 Gbit/s", expected a rate such as "25 Gbit/s", within the
| range of a float

## absurd rate
- nic = { bandwidth = "100 Gbit/s", latency = "10 us" }
+ nic = { bandwidth = "1e30 B/s", latency = "10 us" }
> cluster.toml:8: nodes[0].nic.bandwidth: found "1e30 B/s", expected a rate such as "25 Gbit/s", at most 1000000
| PB/s

## rate of nothing
- nic = { bandwidth = "100 Gbit/s", latency = "10 us" }
+ nic = { bandwidth = "1e-300 B/s", latency = "10 us" }
> cluster.toml:8: nodes[0].nic.bandwidth: found "1e-300 B/s", expected a rate such as "25 Gbit/s", at least 1e-06
| B/s

## rate and latency swapped
- nic = { bandwidth = "100 Gbit/s", latency = "10 us" }
+ nic = { bandwidth = "10 us", latency = "100 Gbit/s" }
> cluster.toml:8: nodes[0].nic.bandwidth: found "10 us", expected a rate such as "25 Gbit/s"
> cluster.toml:8: nodes[0].nic.latency: found "100 Gbit/s", expected a time such as "30 us"

## bare latency
- nic = { bandwidth = "100 Gbit/s", latency = "10 us" }
+ nic = { bandwidth = "100 Gbit/s", latency = 1e-5 }
> cluster.toml:8: nodes[0].nic.latency: found 1e-05, expected a time such as "30 us"; a number needs its unit: did
| you mean "1e-05 us"?

## family of device kinds
- devices = { kind = "A100-80GB", count = 2 }
+ devices = { kind = "A100", count = 2 }
> cluster.toml:6: nodes[0].devices[0].kind: found "A100", expected a device kind from the catalogue or from
| [[kinds]]; did you mean "A100-40GB" or "A100-80GB" or "A100-80GB-PCIe"?

## misspelt device kind
- devices = { kind = "A100-80GB", count = 2 }
+ devices = { kind = "V10O-32GB", count = 2 }
> cluster.toml:6: nodes[0].devices[0].kind: found "V10O-32GB", expected a device kind from the catalogue or from
| [[kinds]]; did you mean "V100-32GB"?

## number for a device kind
- devices = { kind = "A100-80GB", count = 2 }
+ devices = { kind = 100, count = 2 }
> cluster.toml:6: nodes[0].devices[0].kind: found 100, expected a valid string

## text for the devices
- devices = { kind = "A100-80GB", count = 2 }
+ devices = "A100-80GB"
> cluster.toml:6: nodes[0].devices: found "A100-80GB", expected a table such as { kind = "A100-80GB", count = 4 },
| or a list of them

## list of texts for the devices
- devices = { kind = "A100-80GB", count = 2 }
+ devices = ["A100-80GB"]
> cluster.toml:6: nodes[0].devices[0]: found "A100-80GB", expected a table

## no devices
- devices = { kind = "A100-80GB", count = 2 }
+ devices = []
> cluster.toml:6: nodes[0].devices: found 0 items, expected at least 1

## no nodes of a group
- count = 2
+ count = 0
> cluster.toml:5: nodes[0].count: found 0, expected a whole number from 1 to 10000

## negative count
- devices = { kind = "A100-80GB", count = 2 }
+ devices = { kind = "A100-80GB", count = -2 }
> cluster.toml:6: nodes[0].devices[0].count: found -2, expected a whole number from 1 to 10000

## text for a count
- count = 2
+ count = "2"
> cluster.toml:5: nodes[0].count: found "2", expected a whole number from 1 to 10000

## truth for a count
- count = 2
+ count = true
> cluster.toml:5: nodes[0].count: found true, expected a whole number from 1 to 10000

## fraction for a count
- count = 2
+ count = 2.0
> cluster.toml:5: nodes[0].count: found 2.0, expected a whole number from 1 to 10000

## count without end
- count = 2
+ count = 99999999999999999999
> cluster.toml:5: nodes[0].count: found 99999999999999999999, expected a whole number from 1 to 10000

## more devices than a cluster has
- count = 2
- devices = { kind = "A100-80GB", count = 2 }
+ count = 10000
+ devices = { kind = "A100-80GB", count = 100 }
> cluster.toml:3: nodes: found 1000000, expected at most 100000 devices in all

## efficiency in percent
- devices = { kind = "A100-80GB", count = 2 }
+ devices = { kind = "A100-80GB", count = 2, efficiency = 95 }
> cluster.toml:6: nodes[0].devices[0].efficiency: found 95, expected a number above 0, at most 1.5

## efficiency with a unit
- devices = { kind = "A100-80GB", count = 2 }
+ devices = { kind = "A100-80GB", count = 2, efficiency = "95%" }
> cluster.toml:6: nodes[0].devices[0].efficiency: found "95%", expected a number above 0, at most 1.5

## efficiency that is not a number
- devices = { kind = "A100-80GB", count = 2 }
+ devices = { kind = "A100-80GB", count = 2, efficiency = nan }
> cluster.toml:6: nodes[0].devices[0].efficiency: found nan, expected a number above 0, at most 1.5

## infinite price
- devices = { kind = "A100-80GB", count = 2 }
+ devices = { kind = "A100-80GB", count = 2, price_per_hour = inf }
> cluster.toml:6: nodes[0].devices[0].price_per_hour: found inf, expected a finite number, at least 0

## name with a space
- name = "c"
+ name = "my cluster"
> cluster.toml:1: name: found "my cluster", expected a name of letters, digits, - and _

## node name with a dot
- name = "a"
+ name = "a.b"
> cluster.toml:4: nodes[0].name: found "a.b", expected a name of letters, digits, - and _

## number for a name
- name = "c"
+ name = 3
> cluster.toml:1: name: found 3, expected a name of letters, digits, - and _

## no name
- name = "c"
+
> cluster.toml: name: expected a value: this field is required

## later version
- name = "c"
+ name = "c"
+ version = 2
> cluster.toml:2: version: found 2, expected one of 1

## text for the version
- name = "c"
+ name = "c"
+ version = "1"
> cluster.toml:2: version: found "1", expected one of 1

## several devices without a medium
- intra = [{ medium = "nvlink", bandwidth = "300 GB/s", latency = "3 us" }]
+ # intra = [{ medium = "nvlink", bandwidth = "300 GB/s", latency = "3 us" }]
> cluster.toml:3: nodes[0].intra: expected at least one medium between the 2 devices of a node

## one medium without its list
- intra = [{ medium = "nvlink", bandwidth = "300 GB/s", latency = "3 us" }]
+ intra = { medium = "nvlink", bandwidth = "300 GB/s" }
> cluster.toml:7: nodes[0].intra: found a table, expected a valid list

## medium twice, and one called nic
- intra = [{ medium = "nvlink", bandwidth = "300 GB/s", latency = "3 us" }]
+ intra = [{ medium = "nvlink", bandwidth = "300 GB/s", latency = "3 us" },
+   { medium = "nvlink", bandwidth = "1 GB/s" },
+   { medium = "nic", bandwidth = "1 GB/s" }]
> cluster.toml:8: nodes[0].intra[1].medium: found "nvlink", expected a name used once per node, neither nic nor
| uplink
> cluster.toml:9: nodes[0].intra[2].medium: found "nic", expected a name used once per node, neither nic nor uplink

## text for shared
- intra = [{ medium = "nvlink", bandwidth = "300 GB/s", latency = "3 us" }]
+ intra = [{ medium = "nvlink", bandwidth = "300 GB/s", latency = "3 us", shared = "yes" }]
> cluster.toml:7: nodes[0].intra[0].shared: found "yes", expected a valid boolean

## rate for the whole nic
- nic = { bandwidth = "100 Gbit/s", latency = "10 us" }
+ nic = "100 Gbit/s"
> cluster.toml:8: nodes[0].nic: found "100 Gbit/s", expected a table

## conflict with an unknown medium
- intra = [{ medium = "nvlink", bandwidth = "300 GB/s", latency = "3 us" }]
+ intra = [{ medium = "nvlink", bandwidth = "300 GB/s", latency = "3 us" }]
+ conflicts = [["nvlink", "nvlnk"]]
> cluster.toml:8: nodes[0].conflicts[0][1]: found "nvlnk", expected one of the media nvlink; did you mean "nvlink"?

## conflict of one
- intra = [{ medium = "nvlink", bandwidth = "300 GB/s", latency = "3 us" }]
+ intra = [{ medium = "nvlink", bandwidth = "300 GB/s", latency = "3 us" }]
+ conflicts = [["nvlink"]]
> cluster.toml:8: nodes[0].conflicts[0]: found a list of 1, expected two or more different media

## conflict with itself
- intra = [{ medium = "nvlink", bandwidth = "300 GB/s", latency = "3 us" }]
+ intra = [{ medium = "nvlink", bandwidth = "300 GB/s", latency = "3 us" }]
+ conflicts = [["nvlink", "nvlink"]]
> cluster.toml:8: nodes[0].conflicts[0]: found a list of 2, expected two or more different media

## conflicts without their inner lists
- intra = [{ medium = "nvlink", bandwidth = "300 GB/s", latency = "3 us" }]
+ intra = [{ medium = "nvlink", bandwidth = "300 GB/s", latency = "3 us" }]
+ conflicts = ["nvlink", "pcie"]
> cluster.toml:8: nodes[0].conflicts[0]: found "nvlink", expected a valid list
> cluster.toml:8: nodes[0].conflicts[1]: found "pcie", expected a valid list

## four mistakes at once
- count = 2
- devices = { kind = "A100-80GB", count = 2 }
- intra = [{ medium = "nvlink", bandwidth = "300 GB/s", latency = "3 us" }]
+ cuont = 2
+ devices = { kind = "A100-80GB", count = 0, efficiency = 2 }
+ itnra = [{ medium = "nvlink", bandwidth = "300 GB/s", latency = "3 us" }]
> cluster.toml:5: nodes[0].cuont: found an unknown field, expected one of the fields conflicts, count, cpus,
| devices, host_memory, hosts, intra, name, nic; did you mean "count"?
> cluster.toml:6: nodes[0].devices[0].count: found 0, expected a whole number from 1 to 10000
> cluster.toml:6: nodes[0].devices[0].efficiency: found 2, expected a number above 0, at most 1.5
> cluster.toml:7: nodes[0].itnra: found an unknown field, expected one of the fields conflicts, count, cpus,
| devices, host_memory, hosts, intra, name, nic; did you mean "intra"?
"""
"""Lines of ``GOOD`` that are taken out (-) and put in (+)."""

ADDED = r"""
## unknown section
[[link]]
between = ["a0", "a1"]
> cluster.toml:10: link: found an unknown field, expected one of the fields changes, conflicts, kinds, links, name,
| nodes, shared, switches, version; did you mean "links"?

## node name plus index taken
[[nodes]]
name = "a1"
count = 3
devices = { kind = "T4" }
[[nodes]]
name = "a"
count = 11
devices = { kind = "T4" }
> cluster.toml:15: nodes[2].name: found "a0, a1, a10", expected nodes that differ in name plus index

## link to nowhere
[[links]]
between = ["a*", "v*"]
bandwidth = "10 Gbit/s"
> cluster.toml:11: links[0].between[1]: found "v*", expected a node (a0, a1) or a pattern such as "a*"

## link between three groups
[[links]]
between = ["a0", "a1", "a*"]
bandwidth = "10 Gbit/s"
> cluster.toml:11: links[0].between: found a list of 3, expected two groups of nodes such as ["a*", "v0"]

## link between text
[[links]]
between = "a0-a1"
bandwidth = "10 Gbit/s"
> cluster.toml:11: links[0].between: found "a0-a1", expected two groups of nodes such as ["a*", "v0"]

## link between groups that overlap
[[links]]
between = ["a0", "a*"]
bandwidth = "10 Gbit/s"
> cluster.toml:11: links[0].between: found "a0 and a*", expected two groups that do not share a0

## link from a node to itself
[[links]]
between = ["a0", "a0"]
bandwidth = "10 Gbit/s"
> cluster.toml:11: links[0].between: found "a0", expected two nodes or more

## link without bandwidth
[[links]]
between = ["a0", "a1"]
> cluster.toml:10: links[0].bandwidth: expected a value: this field is required

## two links of one name
[[links]]
name = "wan"
between = ["a0", "a1"]
bandwidth = "1 Gbit/s"
[[links]]
name = "wan"
between = ["a0", "a1"]
bandwidth = "1 Gbit/s"
> cluster.toml:15: links[1].name: found "wan", expected a name that no other edge has

## price with a currency
[[links]]
between = ["a0", "a1"]
bandwidth = "1 Gbit/s"
price_per_gb = "0.02 $"
> cluster.toml:13: links[0].price_per_gb: found "0.02 $", expected a finite number, at least 0

## switches in a circle
[[switches]]
name = "r"
nodes = ["a*"]
parent = "s"
uplink = { bandwidth = "1 Gbit/s" }
[[switches]]
name = "s"
parent = "r"
uplink = { bandwidth = "1 Gbit/s" }
> cluster.toml:13: switches[0].parent: found "s", expected a switch that is not below r
> cluster.toml:17: switches[1].parent: found "r", expected a switch that is not below s

## misspelt parent
[[switches]]
name = "rack"
nodes = ["a*"]
parent = "rak"
uplink = { bandwidth = "1 Gbit/s" }
> cluster.toml:13: switches[0].parent: found "rak", expected one of the switches rack; did you mean "rack"?

## node under two switches
[[switches]]
name = "r"
nodes = ["a*"]
uplink = { bandwidth = "1 Gbit/s" }
[[switches]]
name = "s"
nodes = ["a1"]
uplink = { bandwidth = "1 Gbit/s" }
> cluster.toml:16: switches[1].nodes[0]: found "a1", expected nodes under one switch: a1 is already under r

## switch called as another, and one as a node
[[switches]]
name = "r"
uplink = { bandwidth = "1 Gbit/s" }
[[switches]]
name = "r"
uplink = { bandwidth = "1 Gbit/s" }
[[switches]]
name = "a0"
uplink = { bandwidth = "1 Gbit/s" }
> cluster.toml:14: switches[1].name: found "r", expected a name that no other switch or node has
> cluster.toml:17: switches[2].name: found "a0", expected a name that no other switch or node has

## switch without uplink, of unknown nodes
[[switches]]
name = "r"
nodes = "a*"
> cluster.toml:10: switches[0].uplink: expected a value: this field is required
> cluster.toml:12: switches[0].nodes: found "a*", expected a valid list

## switch over unknown nodes
[[switches]]
name = "r"
nodes = ["b*"]
uplink = { bandwidth = "1 Gbit/s" }
> cluster.toml:12: switches[0].nodes[0]: found "b*", expected a node (a0, a1) or a pattern such as "a*"

## shared capacity over an unknown edge
[[shared]]
name = "root"
edges = ["a0.nvlnk"]
bandwidth = "1 GB/s"
> cluster.toml:12: shared[0].edges[0]: found "a0.nvlnk", expected an edge such as a0.nvlink, a0.nic, a1.nvlink,
| a1.nic; did you mean "a0.nvlink"?

## shared capacity over nothing
[[shared]]
name = "root"
edges = []
bandwidth = "1 GB/s"
> cluster.toml:12: shared[0].edges: found 0 items, expected at least 1

## shared capacity twice
[[shared]]
name = "root"
edges = ["a0.*"]
bandwidth = "1 GB/s"
[[shared]]
name = "root"
edges = ["a1.*"]
bandwidth = "1 GB/s"
> cluster.toml:15: shared[1].name: found "root", expected a name that no other edge has

## own kind with wrong units
[[kinds]]
name = "mine"
memory = "8 GB/s"
memory_bandwidth = 900
flops = { bf16 = "10 TFLOPS", bf17 = "1 TFLOP/s" }
> cluster.toml:12: kinds[0].memory: found "8 GB/s", expected a size such as "80 GiB"; did you mean "8 GB"?
> cluster.toml:13: kinds[0].memory_bandwidth: found 900, expected a rate such as "25 Gbit/s"; a number needs its
| unit: did you mean "900 Gbit/s"?
> cluster.toml:14: kinds[0].flops.bf16: found "10 TFLOPS", expected a compute rate such as "312 TFLOP/s"; did you
| mean "10 TFLOP/s"?
> cluster.toml:14: kinds[0].flops.bf17: found "bf17", expected one of "fp32", "tf32", "fp16", "bf16", "fp8"; did you
| mean "bf16"?

## own kind of nothing
[[kinds]]
name = "mine"
memory = "0 GB"
memory_bandwidth = "0 GB/s"
flops = {}
> cluster.toml:12: kinds[0].memory: found "0 GB", expected a size such as "80 GiB", more than 0
> cluster.toml:13: kinds[0].memory_bandwidth: found "0 GB/s", expected a rate such as "25 Gbit/s", more than 0
> cluster.toml:14: kinds[0].flops: found 0 items, expected at least 1

## own kind twice
[[kinds]]
name = "mine"
memory = "8 GB"
memory_bandwidth = "1 GB/s"
flops = { fp32 = "1 TFLOP/s" }
[[kinds]]
name = "mine"
memory = "8 GB"
memory_bandwidth = "1 GB/s"
flops = { fp32 = "1 TFLOP/s" }
> cluster.toml:16: kinds[1].name: found "mine", expected a name that no other kind has

## own kind misspelt
[[kinds]]
name = "my-card"
memory = "8 GB"
memory_bandwidth = "1 GB/s"
flops = { fp32 = "1 TFLOP/s" }
[[nodes]]
name = "b"
devices = { kind = "my-crad" }
> cluster.toml:17: nodes[1].devices[0].kind: found "my-crad", expected a device kind from the catalogue or from
| [[kinds]]; did you mean "my-card"?
"""
"""What follows ``GOOD``."""

CHANGES = r"""
## unknown link
[[changes]]
link = "a0.nik"
steps = [["10 s", "1 Gbit/s"]]
> cluster.toml:11: changes[0].link: found "a0.nik", expected an edge of the cluster, such as a0.nic, a0.nvlink,
| a1.nic, a1.nvlink; did you mean "a0.nic"?

## unknown device
[[changes]]
device = "b0.0"
steps = [["10 s", 0.5]]
> cluster.toml:11: changes[0].device: found "b0.0", expected a device of the cluster, such as a0.0, a0.1, a1.0,
| a1.1; did you mean "a0.0"?

## link and device
[[changes]]
link = "a0.nic"
device = "a0.0"
steps = [["10 s", 0.5]]
> cluster.toml:10: changes[0]: found both, expected either "link" or "device"

## neither link nor device
[[changes]]
steps = [["10 s", 0.5]]
> cluster.toml:10: changes[0]: found neither, expected either "link" or "device"

## steps and generator
[[changes]]
link = "a0.nic"
steps = [["10 s", "1 Gbit/s"]]
generator = "flap"
> cluster.toml:10: changes[0]: found "steps" and "generator", expected exactly one of "steps" (and "latency_steps"),
| "trace", "generator"

## trace and generator
[[changes]]
link = "a0.nic"
trace = "night.csv"
generator = "flap"
> cluster.toml:10: changes[0]: found "trace" and "generator", expected exactly one of "steps" (and "latency_steps"),
| "trace", "generator"

## no way to change
[[changes]]
link = "a0.nic"
> cluster.toml:10: changes[0]: found none, expected exactly one of "steps" (and "latency_steps"), "trace",
| "generator"

## no steps
[[changes]]
link = "a0.nic"
steps = []
> cluster.toml:12: changes[0].steps: found 0 items, expected at least 1

## steps out of order
[[changes]]
link = "a0.nic"
steps = [
  ["10 s", "1 Gbit/s"],
  ["5 s", "2 Gbit/s"],
  ["5 s", "3 Gbit/s"],
]
> cluster.toml:14: changes[0].steps[1][0]: found "5 s", expected times that increase
> cluster.toml:15: changes[0].steps[2][0]: found "5 s", expected times that increase

## steps of one and three
[[changes]]
link = "a0.nic"
steps = [["10 s"], ["20 s", "1 Gbit/s", "1 ms"]]
> cluster.toml:12: changes[0].steps[0]: found a list of 1, expected a pair such as ["30 s", value]
> cluster.toml:12: changes[0].steps[1]: found a list of 3, expected a pair such as ["30 s", value]

## steps without their inner lists
[[changes]]
link = "a0.nic"
steps = ["10 s", "1 Gbit/s"]
> cluster.toml:12: changes[0].steps[0]: found "10 s", expected a pair such as ["30 s", value]
> cluster.toml:12: changes[0].steps[1]: found "1 Gbit/s", expected a pair such as ["30 s", value]

## steps without units
[[changes]]
link = "a0.nic"
steps = [[10, 4]]
> cluster.toml:12: changes[0].steps[0][0]: found 10, expected a time such as "30 s"; a number needs its unit: did
| you mean "10 s"?
> cluster.toml:12: changes[0].steps[0][1]: found 4, expected a rate such as "25 Gbit/s"; a number needs its unit:
| did you mean "4 Gbit/s"?

## steps with time and rate swapped
[[changes]]
link = "a0.nic"
steps = [["1 Gbit/s", "10 s"]]
> cluster.toml:12: changes[0].steps[0][0]: found "1 Gbit/s", expected a time such as "30 s"
> cluster.toml:12: changes[0].steps[0][1]: found "10 s", expected a rate such as "25 Gbit/s"

## steps after the end of time
[[changes]]
link = "a0.nic"
steps = [["1e13 s", "1 Gbit/s"]]
> cluster.toml:10: changes[0]: found "10000000000000.0 s", expected times below 1e+12 s

## negative speed
[[changes]]
device = "a0.0"
steps = [["10 s", -0.5]]
> cluster.toml:12: changes[0].steps[0][1]: found -0.5, expected a speed from 0 to 100, where 1 is full speed

## speed with a unit
[[changes]]
device = "a0.0"
steps = [["10 s", "50 %"]]
> cluster.toml:12: changes[0].steps[0][1]: found "50 %", expected a speed from 0 to 100, where 1 is full speed

## speed in per mille
[[changes]]
device = "a0.0"
steps = [["10 s", 500]]
> cluster.toml:12: changes[0].steps[0][1]: found 500, expected a speed from 0 to 100, where 1 is full speed

## latency of a device
[[changes]]
device = "a0.0"
latency_steps = [["10 s", "1 ms"]]
> cluster.toml:12: changes[0].latency_steps: expected only "steps" for a device, which has no latency

## trace that is missing
[[changes]]
link = "a0.nic"
trace = "traces/night.csv"
> cluster.toml:12: changes[0].trace: found "traces/night.csv", expected a file at traces/night.csv

## trace with errors inside
[[changes]]
link = "a0.nic"
trace = "bad.csv"
> bad.csv:2: bandwidth: found "4 Gb/s", expected a rate such as "25 Gbit/s"; "Gb/s" could be bits or bytes: write "4
| Gbit/s" or "4 GB/s"
> bad.csv:3: seconds: found "x", expected a number of at least 0, without a unit

## trace of speeds for a link
[[changes]]
link = "a0.nic"
trace = "speed.csv"
> cluster.toml:12: changes[0].trace: found "speed.csv", expected a trace with a bandwidth or latency column for a
| link

## trace of bandwidths for a device
[[changes]]
device = "a0.0"
trace = "band.csv"
> cluster.toml:12: changes[0].trace: found "band.csv", expected a trace with a speed column for a device

## trace after the end of time
[[changes]]
link = "a0.nic"
trace = "late.csv"
> cluster.toml:10: changes[0]: found "10000000000000.0 s", expected times below 1e+12 s

## trace of absurd speeds
[[changes]]
device = "a0.0"
trace = "fast.csv"
> cluster.toml:10: changes[0]: found 500.0, expected a speed from 0 to 100, where 1 is full speed

## unknown generator
[[changes]]
link = "a0.nic"
generator = "onoff"
> cluster.toml:12: changes[0].generator: found "onoff", expected one of the generators on-off, periodic,
| random-walk, markov, token-bucket, flap, straggler; did you mean "on-off"?

## unknown parameter
[[changes]]
link = "a0.nic"
generator = "on-off"
parameters = { lwo = 0.1 }
> cluster.toml:13: changes[0].parameters.lwo: found "lwo", expected one of the parameters on, off, low, durations;
| did you mean "low"?

## parameter that is wrong
[[changes]]
link = "a0.nic"
generator = "on-off"
parameters = { low = 10 }
> cluster.toml:13: changes[0].parameters.low: found 10, expected a share from 0 to 1

## parameter at the wrong level
[[changes]]
link = "a0.nic"
generator = "on-off"
low = 0.1
> cluster.toml:13: changes[0].low: found an unknown field, expected one of the fields device, generator, horizon,
| latency_steps, link, parameters, seed, steps, trace

## negative seed and no horizon
[[changes]]
link = "a0.nic"
generator = "on-off"
seed = -1
horizon = "0 s"
> cluster.toml:13: changes[0].seed: found -1, expected a whole number, at least 0
> cluster.toml:14: changes[0].horizon: found "0 s", expected a time such as "10 min", more than 0

## parameters without a generator
[[changes]]
link = "a0.nic"
steps = [["10 s", "1 Gbit/s"]]
parameters = { low = 0.1 }
seed = 3
> cluster.toml:13: changes[0].parameters: expected a "generator" beside it
> cluster.toml:14: changes[0].seed: expected a "generator" beside it

## two changes, both wrong
[[changes]]
link = "a0.nik"
steps = [["10 s", "1 Gbit/s"]]
[[changes]]
device = "a0.0"
steps = [["10 s", "1 Gbit/s"]]
> cluster.toml:11: changes[0].link: found "a0.nik", expected an edge of the cluster, such as a0.nic, a0.nvlink,
| a1.nic, a1.nvlink; did you mean "a0.nic"?
> cluster.toml:15: changes[1].steps[0][1]: found "1 Gbit/s", expected a speed from 0 to 100, where 1 is full speed
"""
"""Entries that follow ``GOOD``."""

WHOLE = r"""
## empty file
> cluster.toml: name: expected a value: this field is required
> cluster.toml: nodes: expected a value: this field is required

## no nodes
name = "c"
> cluster.toml: nodes: expected a value: this field is required

## empty list of nodes
name = "c"
nodes = []
> cluster.toml:2: nodes: found 0 items, expected at least 1

## one table for the nodes
name = "c"
[nodes]
name = "a"
> cluster.toml:2: nodes: found a table, expected a valid list

## text without quotes
name = c
> cluster.toml:1: found invalid value, expected valid TOML

## bracket that is missing
name = "c"

[[nodes]
name = "a"
> cluster.toml:3: found no ']]' at the end of an array declaration, expected valid TOML

## key twice
name = "c"
name = "d"
> cluster.toml:2: found an attempt to overwrite a value, expected valid TOML

## text without end
name = "c"
[[nodes]]
name = "a
> cluster.toml:3: found illegal character '\n', expected valid TOML

## list without end
name = "c"
nodes = [
> cluster.toml:2: found invalid value, expected valid TOML

## conflict of unknown edges
name = "c"
conflicts = [["a0.nic", "b0.nic"], ["a0.nic"], ["a*", "a0.nic"]]
[[nodes]]
name = "a"
devices = { kind = "T4" }
nic = { bandwidth = "1 Gbit/s" }
> cluster.toml:2: conflicts[0][1]: found "b0.nic", expected an edge such as a0.nic; did you mean "a0.nic"?
> cluster.toml:2: conflicts[1]: found a list of 1, expected two or more different edges
> cluster.toml:2: conflicts[2]: found a list of 2, expected two or more different edges
"""
"""Files of their own."""


def message(text: str) -> str:
    """What is said about a cluster file in the current folder."""
    Path("cluster.toml").write_text(text, encoding="utf-8")
    with pytest.raises(InputError) as caught:
        load_cluster("cluster.toml")
    return str(caught.value)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder with a few traces, as the current one."""
    monkeypatch.chdir(tmp_path)
    for name, text in TRACES.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    return tmp_path


def test_the_file_without_mistakes_loads() -> None:
    Path("cluster.toml").write_text(GOOD, encoding="utf-8")
    assert repr(load_cluster("cluster.toml")) == "c: 4x A100-80GB in 2 nodes"


@pytest.mark.parametrize("case", cases(EDITED))
def test_a_wrong_field_is_named(case: Case) -> None:
    lines = case.text.splitlines()
    old = "".join(line[2:] + "\n" for line in lines if line.startswith("-"))
    new = "".join(line[2:] + "\n" for line in lines if line.startswith("+"))
    assert old in GOOD
    assert message(GOOD.replace(old, new)) == case.message


@pytest.mark.parametrize("case", [*cases(ADDED), *cases(CHANGES)])
def test_a_wrong_entry_is_named(case: Case) -> None:
    assert message(GOOD + case.text) == case.message


@pytest.mark.parametrize("case", cases(WHOLE))
def test_a_wrong_file_is_named(case: Case) -> None:
    assert message(case.text) == case.message


def test_a_file_that_is_not_utf_8() -> None:
    Path("latin.toml").write_bytes('name = "é"'.encode("latin-1"))
    with pytest.raises(InputError) as caught:
        load_cluster("latin.toml")
    assert str(caught.value) == "latin.toml: found other bytes, expected UTF-8 text"


def test_a_file_with_a_byte_order_mark_loads() -> None:
    Path("notepad.toml").write_text(GOOD, encoding="utf-8-sig")
    assert load_cluster("notepad.toml").name == "c"


def test_a_folder_is_no_cluster(folder: Path) -> None:
    (folder / "racks.toml").mkdir()
    with pytest.raises(InputError) as caught:
        load_cluster("racks.toml")
    assert str(caught.value) == "racks.toml: found a folder, expected a file"


def test_a_file_that_is_missing() -> None:
    with pytest.raises(InputError) as caught:
        load_cluster("nowhere.toml")
    assert str(caught.value) == "nowhere.toml: there is no such file"


def test_a_bundled_cluster_that_is_misspelt() -> None:
    with pytest.raises(InputError) as caught:
        load_cluster("mixed-15")
    assert str(caught.value) == (
        f'found "mixed-15", expected a cluster file or one of the bundled clusters {", ".join(bundled_clusters())}; '
        'did you mean "mixed-16"?'
    )


def test_the_text_of_a_file_is_not_its_name() -> None:
    with pytest.raises(InputError, match="expected a cluster file or one of the bundled clusters"):
        load_cluster(GOOD * 40)


def test_tables_within_tables_without_end() -> None:
    assert message("name = " + "[" * 5000 + "]" * 5000) == (
        "Cannot read cluster.toml because its tables are nested too deeply. Try a simpler document."
    )


def test_a_number_without_end() -> None:
    assert message("version = " + "1" * 5000) == (
        "Cannot read cluster.toml because a number in it is too long. Try a simpler document."
    )


def test_nodes_without_a_nic_have_no_route() -> None:
    Path("cluster.toml").write_text(GOOD.replace("nic =", "# nic ="), encoding="utf-8")
    cluster = load_cluster("cluster.toml")
    assert cluster.routes("a0.0", "a0.1")
    with pytest.raises(InfeasibleError) as caught:
        cluster.routes("a0.0", "a1.0")
    assert str(caught.value) == (
        "c: no route from a0.0 to a1.0; give their nodes a nic, or a [[links]] entry between them"
    )


@pytest.mark.parametrize("name", bundled_clusters())
def test_bundled_clusters_load(name: str) -> None:
    cluster = load_cluster(name)
    assert cluster.name == name
    assert cluster_from_content(cluster.content) == cluster


@pytest.mark.parametrize(
    "content", ["", "[]", "{", '{"name": "c"}', '{"name": "c", "nodes": [{}], "nodes": 3}']
)
def test_content_that_is_no_cluster_is_refused(content: str) -> None:
    with pytest.raises(InputError, match=r"^cluster"):
        cluster_from_content(content)


def test_wrong_changes_in_place_of_the_own_ones() -> None:
    cluster = good()
    with pytest.raises(InputError) as caught:
        with_changes(cluster, [{"link": "a9.nic", "steps": [["0 s", "1 Gbit/s"]]}], file="--trace")
    assert str(caught.value) == (
        '--trace: changes[0].link: found "a9.nic", expected an edge of the cluster, such as a0.nic, a0.nvlink, '
        'a1.nic, a1.nvlink; did you mean "a1.nic"?'
    )


def test_a_foreign_device_has_no_route() -> None:
    with pytest.raises(InputError) as caught:
        good().routes("a0.0", "a0.00")
    assert str(caught.value) == 'found "a0.00", expected a device of c; did you mean "a0.0"?'


def good() -> Cluster:
    Path("good.toml").write_text(GOOD, encoding="utf-8")
    return load_cluster("good.toml")
