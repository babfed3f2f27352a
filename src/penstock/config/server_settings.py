"""The settings that brokers and NameServers share, and those of the NameServer."""

from typing import Annotated

from penstock.config.doc import I32_MAX, PORT_MAX, Checked, Doc


def check_user(text: str) -> None:
    """Empty, or username:password."""
    name, _, password = text.partition(":")
    if text and not (name and password):
        raise ValueError("must be username:password")


class ServerConfig(Checked, frozen=True, forbid_unknown_fields=True):
    """Connections and limits of a broker or NameServer."""

    frame_bytes_max: Annotated[
        int, Doc("The maximum size of a frame. A connection that sends a larger one is closed.",
                 "com.rocketmq.remoting.frameMaxLength", least=1024, most=I32_MAX)
    ] = 16 * 1024 * 1024  # fmt: skip
    header_bytes_max: Annotated[
        int, Doc("The maximum size of the header of a frame.", least=256, most=(1 << 24) - 1)
    ] = 1024 * 1024  # as `wire.frame.HEADER_BYTES_MAX`
    connections_max: Annotated[
        int, Doc("The maximum number of connections.", live=True, least=1)
    ] = 20_000
    idle_ms: Annotated[
        int, Doc("A connection without traffic for this long is closed.",
                 "serverChannelMaxIdleTimeSeconds", live=True, least=1, form="in seconds")
    ] = 120_000  # fmt: skip
    output_bytes_max: Annotated[
        int, Doc("The server stops reading from a connection with more unsent responses than this.",
                 live=True, least=16 * 1024)
    ] = 1024 * 1024  # fmt: skip
    memory_bytes_max: Annotated[
        int, Doc("The maximum size of unfinished requests and unsent responses of all connections "
                 "together.", live=True, least=1)
    ] = 256 * 1024 * 1024  # fmt: skip
    stop_ms: Annotated[
        int, Doc("How long a stopping server waits until its responses are sent.")
    ] = 5_000


class TlsConfig(Checked, frozen=True, forbid_unknown_fields=True):
    """TLS of a broker or NameServer."""

    mode: Annotated[
        str, Doc("TLS on the server's ports: off, permissive (TLS and plain connections) or "
                 "enforcing.", "tls.server.mode", choices=("off", "permissive", "enforcing"),
                 form="`disabled` for off")
    ] = "permissive"  # fmt: skip
    certificate: Annotated[
        str, Doc("The PEM file of the certificate chain. Empty: `permissive` uses a temporary "
                 "self-signed certificate, which clients can't verify.", "tls.server.certPath",
                 path=True)
    ] = ""  # fmt: skip
    key: Annotated[
        str, Doc("The PEM file of the private key.", "tls.server.keyPath", path=True)
    ] = ""
    key_password: Annotated[
        str, Doc("The password of the private key.", "tls.server.keyPassword", secret=True)
    ] = ""
    client_ca: Annotated[
        str, Doc("The PEM file of the CAs that client certificates are verified with.",
                 "tls.server.trustCertPath", path=True)
    ] = ""  # fmt: skip
    client_auth: Annotated[
        str, Doc("Whether clients must present a certificate: none, optional or require.",
                 "tls.server.need.client.auth", choices=("none", "optional", "require"))
    ] = "none"  # fmt: skip
    outgoing: Annotated[
        bool, Doc("Use TLS for connections to NameServers and, at a slave, to the master. The "
                  "broker sends its own certificate if the server requests one.", "tls.enable")
    ] = False  # fmt: skip
    outgoing_ca: Annotated[
        str, Doc("The PEM file of the CAs that NameServers and the master are verified with. "
                 "Empty: no verification.", "tls.client.trustCertPath", path=True)
    ] = ""  # fmt: skip


class AccessConfig(Checked, frozen=True, forbid_unknown_fields=True):
    """Authentication and authorization."""

    authentication: Annotated[
        bool, Doc("Require that requests are signed by a known user.", "authenticationEnabled")
    ] = False
    authorization: Annotated[
        bool, Doc("Check the access lists before a request is executed.", "authorizationEnabled")
    ] = False
    initial_user: Annotated[
        str, Doc("The super user to create at the first start, as username:password.",
                 "initAuthenticationUser", secret=True, check=check_user,
                 form='`{"username":…,"password":…}`')
    ] = ""  # fmt: skip
    internal_user: Annotated[
        str, Doc("The user that signs the broker's own requests, as username:password.",
                 "innerClientAuthenticationCredentials", secret=True, check=check_user,
                 form='`{"accessKey":…,"secretKey":…}`')
    ] = ""  # fmt: skip
    strict_signing: Annotated[
        bool, Doc("Accept only strict signatures, which cover the request code and the time. "
                  "RocketMQ's clients can't make them.")
    ] = False  # fmt: skip
    key_file: Annotated[
        str, Doc("The file of the key that encrypts stored passwords. It is created if it does not "
                 "exist. Empty: config/penstock-access.key in the store.", path=True)
    ] = ""  # fmt: skip


class NameServerConfig(Checked, frozen=True, forbid_unknown_fields=True):
    """The settings of one NameServer."""

    host: Annotated[str, Doc("The address to listen on.", "bindAddress")] = "127.0.0.1"
    port: Annotated[int, Doc("The port to listen on.", "listenPort", most=PORT_MAX)] = 9876
    data: Annotated[
        str, Doc("The directory of the KV config and of changed settings. Empty: they are kept in "
                 "memory only.", "kvConfigPath", path=True, form="the file in that directory")
    ] = ""  # fmt: skip
    signed_changes: Annotated[
        bool, Doc("Accept registrations and all other changes only if the user of "
                  "access.internal_user or access.initial_user has signed them. Apache's brokers "
                  "do not sign.")
    ] = False  # fmt: skip
    broker_expire_ms: Annotated[
        int, Doc("A broker that is silent for this long is removed, unless it asked for a "
                 "different time.", least=1)
    ] = 120_000  # fmt: skip
    scan_ms: Annotated[
        int, Doc("How often the NameServer looks for silent brokers.",
                 "scanNotActiveBrokerInterval", live=True, least=1)
    ] = 5_000  # fmt: skip
    order_messages: Annotated[
        bool, Doc("Include the order configuration of the topic in routes.", "orderMessageEnable",
                  live=True)
    ] = False  # fmt: skip
    acting_master: Annotated[
        bool, Doc("List a slave as a read-only master in routes while its master is missing.",
                  "supportActingMaster", live=True)
    ] = False  # fmt: skip
    delete_absent_topics: Annotated[
        bool, Doc("A registration removes the topics of the broker that it does not list.",
                  "deleteTopicWithBrokerRegistration", live=True)
    ] = False  # fmt: skip
