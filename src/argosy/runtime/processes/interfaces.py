"""List the network interfaces of this machine, and find the address at which other machines reach
it. Needs no torch.

The kernel reports the addresses of interfaces on Linux; on other systems none is known, and no
interface is chosen.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import struct
import sys

from argosy.errors import RunError

# SIOCGIFADDR, the ioctl request that returns the IPv4 address of an interface.
_GET_ADDRESS = 0x8915


def is_loopback(address: str) -> bool:
    """Return whether an address or name, as it is written, is that of the loopback interface.

    >>> is_loopback("127.0.1.1"), is_loopback("localhost"), is_loopback("gpu01")
    (True, True, False)
    """
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(address).is_loopback
    return address == "localhost"


def loopback_interface() -> str:
    """Return the name of the loopback interface: ``lo`` on Linux, ``lo0`` on other systems."""
    return next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")


def interface_settings(interface: str | None) -> dict[str, str]:
    """Return the environment in which gloo and NCCL use an interface; empty if none is named."""
    return (
        {}
        if interface is None
        else {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}
    )


def interface_addresses() -> dict[str, str]:
    """Return the IPv4 address of every interface that has one."""
    if sys.platform != "linux":
        return {}
    import fcntl

    addresses = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # the interface has no address
                reply = fcntl.ioctl(
                    probe.fileno(), _GET_ADDRESS, struct.pack("256s", name.encode()[:15])
                )
                addresses[name] = socket.inet_ntoa(reply[20:24])
    return addresses


def interface_towards(address: str, port: int) -> str | None:
    """Return the interface through which this machine reaches an address, None if unknown. Nothing
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
    """Return the address of this machine to listen at, so that other machines that resolve ``host``
    reach it.

    That is the address to which the name resolves. On some systems a machine's own name resolves to
    its loopback interface, which other machines cannot reach: in that case, and if the name
    resolves to no address of this machine, return the address of ``interface``, or of the only
    interface to the network.
    """
    try:
        place = str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise RunError(
            f"Cannot listen at {host} because the name leads nowhere ({error}). Try --address, or "
            "--here if this machine has all nodes of the plan."
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
        f"Cannot listen at {host} because it leads to {place}, where other machines do not find "
        f"this one. Try an interface for this host in the cluster file (of {names}), or --address."
    )


def _is_own(place: str) -> bool:
    with socket.socket(socket.AF_INET6 if ":" in place else socket.AF_INET) as probe:
        try:
            probe.bind((place, 0))
        except OSError:
            return False
    return True
