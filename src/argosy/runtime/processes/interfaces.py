"""The network interfaces of this machine, and at which address other machines find it. Needs no
torch.

Addresses of interfaces are asked of the kernel, on Linux; elsewhere none is known, and nothing is
chosen.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import struct
import sys

from argosy.errors import RunError

_GET_ADDRESS = 0x8915
"""SIOCGIFADDR: the IPv4 address of an interface."""


def is_loopback(address: str) -> bool:
    """Whether an address or name, as it is written, stays on this machine.

    >>> is_loopback("127.0.1.1"), is_loopback("localhost"), is_loopback("gpu01")
    (True, True, False)
    """
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(address).is_loopback
    return address == "localhost"


def loopback_interface() -> str:
    """``lo`` on Linux, ``lo0`` elsewhere."""
    return next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")


def interface_settings(interface: str | None) -> dict[str, str]:
    """The environment in which gloo and NCCL use an interface; empty where none is named."""
    return (
        {}
        if interface is None
        else {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}
    )


def interface_addresses() -> dict[str, str]:
    """The IPv4 address of every interface that has one."""
    if sys.platform != "linux":
        return {}
    import fcntl

    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has none
                reply = fcntl.ioctl(
                    probe.fileno(), _GET_ADDRESS, struct.pack("256s", name.encode()[:15])
                )
                found[name] = socket.inet_ntoa(reply[20:24])
    return found


def interface_towards(address: str, port: int) -> str | None:
    """The interface by which this machine reaches an address; None where that is not known. Nothing
    is sent."""
    try:
        family, _, _, _, target = socket.getaddrinfo(address, port or 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)
            own = probe.getsockname()[0]
    except OSError:
        return None
    return next((name for name, known in interface_addresses().items() if known == own), None)


def listening_address(host: str, interface: str | None = None) -> str:
    """The address of this machine to listen at, so that other machines that look for ``host`` find
    it.

    That is where the name leads. Some systems have a machine's own name lead to its loopback
    interface, where nobody else comes: then, and if the name leads to no address of this machine,
    it is the address of ``interface``, or of the only interface to the network.
    """
    try:
        place = str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise RunError(
            f"Cannot listen at {host} because the name leads nowhere ({error}). Try --address."
        ) from None
    if is_loopback(host) or (not is_loopback(place) and _is_own(place)):
        return place
    addresses = interface_addresses()
    if interface is not None and interface in addresses:
        return addresses[interface]
    to_network = [known for known in addresses.values() if not is_loopback(known)]
    if len(to_network) == 1:
        return to_network[0]
    names = ", ".join(name for name, known in addresses.items() if not is_loopback(known)) or "none"
    raise RunError(
        f"Cannot listen at {host} because it leads to {place}, where other machines do not find this one. "
        f"Try an interface for this host in the cluster file (of {names}), or --address."
    )


def _is_own(place: str) -> bool:
    with socket.socket(socket.AF_INET6 if ":" in place else socket.AF_INET) as probe:
        try:
            probe.bind((place, 0))
        except OSError:
            return False
    return True
