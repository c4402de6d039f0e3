"""The settings of a trainer on several machines, checked together: HONE_TRAINER_NODES, _NODE_RANK,
_RENDEZVOUS, _INTERFACE."""

from __future__ import annotations

import socket

from shared.errors import BadRequest
from shared.http.urls import is_loopback
from shared.settings import Settings

LOOPBACK = "lo"


def check_nodes(settings: Settings) -> None:
    """Raises BadRequest unless the settings make one trainer of one node or of several."""
    nodes, node_rank, rendezvous = (
        settings.trainer_nodes,
        settings.trainer_node_rank,
        settings.trainer_rendezvous,
    )
    if node_rank >= nodes:
        raise BadRequest(
            f"HONE_TRAINER_NODE_RANK is {node_rank} and HONE_TRAINER_NODES is {nodes}; expected a "
            f"node rank from 0 to {nodes - 1}"
        )
    if nodes == 1:
        return
    if rendezvous is None:
        raise BadRequest(
            f"HONE_TRAINER_NODES is {nodes} and HONE_TRAINER_RENDEZVOUS is not set; expected "
            "<host>:<port>, an address of node 0 "
            "that every node reaches, the same on every node"
        )
    host, _, port = rendezvous.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise BadRequest(
            f"HONE_TRAINER_RENDEZVOUS is {rendezvous!r}; expected <host>:<port>, such as "
            "10.0.0.1:29500"
        )
    interfaces = [name for _, name in socket.if_nameindex()]
    if settings.trainer_interface is None:
        raise BadRequest(
            f"HONE_TRAINER_NODES is {nodes} and HONE_TRAINER_INTERFACE is not set; expected the "
            "network interface of this host on "
            f"which the nodes reach each other, one of {', '.join(interfaces)}"
        )
    if settings.trainer_interface not in interfaces:
        raise BadRequest(
            f"HONE_TRAINER_INTERFACE is {settings.trainer_interface!r}; expected an interface of "
            f"this host: {', '.join(interfaces)}"
        )


def socket_interfaces(settings: Settings) -> dict[str, str]:
    """Returns the variables with the interfaces on which ranks listen, for gloo between ranks and
    for NCCL. NCCL reads its variable once for all groups of a process: the ranks' own groups, and
    the groups with samplers (`weight_sync = "nccl"`). So NCCL gets the loopback if HONE_HOST is
    local. It gets no interface, and finds one itself, if samplers may be in other containers or on
    other hosts."""
    if settings.trainer_nodes > 1 and settings.trainer_interface:
        interface = settings.trainer_interface
        return {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}
    for_nccl = {"NCCL_SOCKET_IFNAME": LOOPBACK} if is_loopback(settings.host) else {}
    return {"GLOO_SOCKET_IFNAME": LOOPBACK} | for_nccl
