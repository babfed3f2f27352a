"""The settings of a controller."""

from typing import Annotated

from penstock.config.doc import PORT_MAX, Checked, Doc

_SCHEMES = ("http://", "https://")


def etcd_endpoints(text: str) -> list[tuple[str, int, bool]]:
    """Host, port and whether it is https://, of each endpoint; ValueError ("must …")."""
    found = []
    for piece in filter(None, (piece.strip() for piece in text.replace(";", ",").split(","))):
        address = piece.rstrip("/")
        for scheme in _SCHEMES:
            address = address.removeprefix(scheme)
        host, colon, port = address.rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        digits = port.isascii() and port.isdigit()
        if not (host and colon and digits and 0 < int(port) <= PORT_MAX) or "/" in host:
            raise ValueError("must be a list of host:port or https://host:port, separated by ,")
        found.append((host, int(port), piece.startswith("https://")))
    return found


def check_prefix(text: str) -> None:
    """Keys begin with it."""
    if not (text.startswith("/") and text.endswith("/") and text.isascii() and text.isprintable()):
        raise ValueError("must begin and end with /, and be printable ASCII")


class ControllerConfig(Checked, frozen=True, forbid_unknown_fields=True):
    """A controller, which decides which replica of a broker is its master."""

    host: Annotated[str, Doc("The address to listen on.", "bindAddress")] = "127.0.0.1"
    port: Annotated[int, Doc("The port to listen on.", "listenPort", most=PORT_MAX)] = 9878
    announce: Annotated[
        str, Doc("The host at which brokers reach this controller. Empty: `controller.host`.")
    ] = ""
    probe_port: Annotated[
        int, Doc("The HTTP port for /metrics, /healthz and /readyz. -1: `controller.port` + 2. 0: "
                 "off.", least=-1, most=PORT_MAX)
    ] = -1  # fmt: skip
    data: Annotated[
        str, Doc("The directory with the state of the broker sets. Not used with etcd.", path=True)
    ] = "penstock-data/controller"  # fmt: skip
    etcd: Annotated[
        str, Doc("The members of an etcd cluster that keeps the state, as host:port or "
                 "https://host:port, separated by commas. Several controllers may use it. Empty: "
                 "the state is kept in files, for one controller.", check=etcd_endpoints)
    ] = ""  # fmt: skip
    etcd_prefix: Annotated[
        str, Doc("The beginning of all keys in etcd. All controllers of a cluster need the same "
                 "prefix.", check=check_prefix)
    ] = "/penstock/controller/"  # fmt: skip
    etcd_user: Annotated[str, Doc("The user of etcd. Empty: no authentication by password.")] = ""
    etcd_password: Annotated[str, Doc("The password of `etcd_user`.", secret=True)] = ""
    etcd_ca: Annotated[
        str, Doc("The PEM file of the CAs that the certificates of etcd are verified with. Empty: "
                 "the CAs of the system. Connections use TLS if a member has https://, or if this "
                 "or `etcd_certificate` is set.", path=True)
    ] = ""  # fmt: skip
    etcd_certificate: Annotated[
        str, Doc("The PEM file of the client certificate for etcd.",
                 path=True)
    ] = ""  # fmt: skip
    etcd_key: Annotated[
        str, Doc("The PEM file of the private key of `etcd_certificate`. Empty: it is in the same "
                 "file.", path=True)
    ] = ""  # fmt: skip
    signed_changes: Annotated[
        bool, Doc("Accept heartbeats, elections and all other changes only if the user of "
                  "access.internal_user or access.initial_user has signed them. Apache's brokers "
                  "do not sign.")
    ] = False  # fmt: skip
    scan_ms: Annotated[
        int, Doc("How often the controller looks for dead masters. A master whose process "
                 "has ended is replaced at once.",
                 "scanNotActiveBrokerInterval", live=True, least=10)
    ] = 250  # fmt: skip
    unclean_elections: Annotated[
        bool, Doc("If no replica of the in-sync set is alive, elect another one. Messages that it "
                  "does not have are lost.", "enableElectUncleanMaster", live=True)
    ] = False  # fmt: skip
