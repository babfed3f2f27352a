"""The settings that any server has, and those of the NameServer."""

from typing import Annotated

from penstock.config.doc import I32_MAX, PORT_MAX, Checked, Doc


def check_user(text: str) -> None:
    """Empty, or username:password."""
    name, _, password = text.partition(":")
    if text and not (name and password):
        raise ValueError("write username:password")


class ServerConfig(Checked, frozen=True, forbid_unknown_fields=True):
    """Connections and limits of a server, broker or NameServer."""

    frame_bytes_max: Annotated[
        int, Doc("longest frame; beyond it the connection is closed",
                 "com.rocketmq.remoting.frameMaxLength", least=1024, most=I32_MAX)
    ] = 16 * 1024 * 1024  # fmt: skip
    header_bytes_max: Annotated[
        int, Doc("longest header of a frame", least=256, most=(1 << 24) - 1)
    ] = 1024 * 1024  # properties that are too long are to be answered, not cut off
    connections_max: Annotated[
        int, Doc("most connections at one time", live=True, least=1)
    ] = 20_000  # fmt: skip
    idle_ms: Annotated[
        int, Doc("a connection without any traffic for this long is closed",
                 "serverChannelMaxIdleTimeSeconds", live=True, least=1, form="in seconds")
    ] = 120_000  # fmt: skip
    output_bytes_max: Annotated[
        int, Doc("unsent answers of one connection above which it is not read from", live=True,
                 least=16 * 1024)
    ] = 1024 * 1024  # fmt: skip
    memory_bytes_max: Annotated[
        int, Doc("unfinished requests and unsent answers of all connections together", live=True,
                 least=1)
    ] = 256 * 1024 * 1024  # fmt: skip
    stop_ms: Annotated[int, Doc("how long a stopping server waits for unsent answers")] = 5_000


class TlsConfig(Checked, frozen=True, forbid_unknown_fields=True):
    """TLS of a server."""

    mode: Annotated[
        str, Doc("off, permissive (TLS and plain on one port) or enforcing", "tls.server.mode",
                 choices=("off", "permissive", "enforcing"), form="`disabled` for off")
    ] = "permissive"  # fmt: skip
    certificate: Annotated[
        str,
        Doc(
            "PEM file of the certificate chain; empty: where `permissive` needs one, it is "
            "made for the moment, and nobody can check it",
            "tls.server.certPath",
            path=True,
        ),
    ] = ""
    key: Annotated[str, Doc("PEM file of the private key", "tls.server.keyPath", path=True)] = ""
    key_password: Annotated[
        str, Doc("password of the key", "tls.server.keyPassword", secret=True)
    ] = ""
    client_ca: Annotated[
        str, Doc("PEM file of authorities that client certificates are checked against",
                 "tls.server.trustCertPath", path=True)
    ] = ""  # fmt: skip
    client_auth: Annotated[
        str, Doc("none, optional or require: whether clients show a certificate",
                 "tls.server.need.client.auth", choices=("none", "optional", "require"))
    ] = "none"  # fmt: skip
    outgoing: Annotated[bool, Doc("whether calls to NameServers use TLS", "tls.enable")] = False
    outgoing_ca: Annotated[
        str, Doc("PEM file of authorities that NameServers are checked against; empty: they are "
                 "not checked", "tls.client.trustCertPath", path=True)
    ] = ""  # fmt: skip


class AccessConfig(Checked, frozen=True, forbid_unknown_fields=True):
    """Who may do what."""

    authentication: Annotated[
        bool, Doc("whether requests must be signed by a known user", "authenticationEnabled")
    ] = False
    authorization: Annotated[
        bool, Doc("whether the access lists are asked before a request is served",
                  "authorizationEnabled")
    ] = False  # fmt: skip
    initial_user: Annotated[
        str, Doc("super user made at the first start: username:password", "initAuthenticationUser",
                 secret=True, check=check_user, form='`{"username":…,"password":…}`')
    ] = ""  # fmt: skip
    internal_user: Annotated[
        str, Doc("user this broker signs its own requests as: username:password",
                 "innerClientAuthenticationCredentials", secret=True, check=check_user,
                 form='`{"accessKey":…,"secretKey":…}`')
    ] = ""  # fmt: skip


class NameServerConfig(Checked, frozen=True, forbid_unknown_fields=True):
    """One NameServer."""

    host: Annotated[str, Doc("address to listen on", "bindAddress")] = "127.0.0.1"
    port: Annotated[int, Doc("port to listen on", "listenPort", most=PORT_MAX)] = 9876
    data: Annotated[
        str, Doc("directory of the KV file and of changed settings; empty: kept in memory only",
                 "kvConfigPath", path=True, form="the file in that directory")
    ] = ""  # fmt: skip
    broker_expire_ms: Annotated[
        int, Doc("a broker that is silent this long is removed, unless it asked for another time",
                 least=1)
    ] = 120_000  # fmt: skip
    scan_ms: Annotated[
        int, Doc("how often silent brokers are looked for", "scanNotActiveBrokerInterval",
                 live=True, least=1)
    ] = 5_000  # fmt: skip
    order_messages: Annotated[
        bool, Doc("whether routes carry the order config of their topic", "orderMessageEnable",
                  live=True)
    ] = False  # fmt: skip
    acting_master: Annotated[
        bool, Doc("whether a slave stands for its missing master in routes, to be read from only",
                  "supportActingMaster", live=True)
    ] = False  # fmt: skip
    delete_absent_topics: Annotated[
        bool, Doc("whether a registration removes the broker's topics that it does not list",
                  "deleteTopicWithBrokerRegistration", live=True)
    ] = False  # fmt: skip
