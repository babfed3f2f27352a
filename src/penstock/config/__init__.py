"""Settings: frozen structs. Every field has a default, a unit in its name and a description.

Live settings may change while a server runs; the others are fixed at start-up.
"""

from penstock.config.broker_settings import BrokerConfig
from penstock.config.controller_settings import ControllerConfig
from penstock.config.doc import Doc
from penstock.config.live_settings import LiveSettings
from penstock.config.replication_settings import ReplicationConfig
from penstock.config.server_settings import AccessConfig, NameServerConfig, ServerConfig, TlsConfig
from penstock.config.settings import Settings
from penstock.config.store_settings import StoreConfig, delays_ms

__all__ = [
    "AccessConfig",
    "BrokerConfig",
    "ControllerConfig",
    "Doc",
    "LiveSettings",
    "NameServerConfig",
    "ReplicationConfig",
    "ServerConfig",
    "Settings",
    "StoreConfig",
    "TlsConfig",
    "delays_ms",
]
