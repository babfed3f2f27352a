"""Writes docs/settings.md from penstock.config: `python -m tests.settings_page`."""

from pathlib import Path

from penstock.config import Doc
from penstock.config.doc import settings_of
from penstock.config.settings import TABLES

PAGE = Path(__file__).parent.parent / "docs" / "settings.md"
HEAD = """# Settings

<!-- Written by `python -m tests.settings_page` from src/penstock/config: change it there. -->

Every setting has a default, a unit in its name, and is either *live* (may change while a server
runs) or *fixed* (read at start). Each source overrides those before it:

1. the defaults below;
2. `NAMESRV_ADDR`, for `broker.nameservers` only, as in RocketMQ;
3. the file given with `-c`;
4. variables of the environment: `PENSTOCK_`, the table, `_` and the setting, in capitals;
5. flags of the command ([running servers](running.md)).

A value that can't be stops the start with one line that names where it stands and what is expected.
A name nobody knows is a warning with the nearest known name.

## In a file, in the environment

A file that ends in `.toml` has a table for each section below:

```toml
[broker]
name = "broker-a"
nameservers = ["10.0.0.1:9876", "10.0.0.2:9876"]   # or one text, separated by ;
data = "/var/lib/penstock/broker-a"

[store]
sync_flush = true
retain_hours = 48
```

The same in the environment:

```sh
export PENSTOCK_BROKER_NAME=broker-a
export PENSTOCK_BROKER_NAMESERVERS="10.0.0.1:9876;10.0.0.2:9876"
export PENSTOCK_BROKER_DATA=/var/lib/penstock/broker-a
export PENSTOCK_STORE_SYNC_FLUSH=true
export PENSTOCK_STORE_RETAIN_HOURS=48
```

Any other file is read as RocketMQ's `broker.conf` (for `penstock nameserver`: `namesrv.conf`), with
the names and forms of the last column; our own names (`broker.lock_lease_ms=30000`) may stand in it
too. Where such a file says nothing, three things are as RocketMQ has them and not as below: the
address is `0.0.0.0`, the broker's name is that of the machine, and the store is `~/store`. Settings
of RocketMQ that have no effect here are listed in one warning. Those that must not be passed over
are errors: `aclEnable=true` (RocketMQ 4's access control), `brokerRole=SLAVE`,
`enableDLegerCommitLog=true`, `enableControllerMode=true`, a `storeType` other than `default`, and a
`storePathCommitLog` outside the store's directory.

```properties
brokerName=broker-a
namesrvAddr=10.0.0.1:9876;10.0.0.2:9876
storePathRootDir=/var/lib/penstock/broker-a
flushDiskType=SYNC_FLUSH
fileReservedTime=48
```

## While a server runs

`mqadmin updateBrokerConfig -b HOST:PORT -k KEY -v VALUE` changes live settings, by RocketMQ's names
or by ours (`-k store.retain_hours`), and takes effect at once; `mqadmin getBrokerConfig` shows all.
A fixed setting is refused by its name, a path or a password always, a name without effect here is
passed over as RocketMQ does. `updateNamesrvConfig` and `getNamesrvConfig` do the same for a
NameServer. Passwords are never shown.
"""
TITLES = {
    "broker": "The broker",
    "store": "The storage engine",
    "server": "Connections and limits, of brokers and NameServers",
    "tls": "TLS, of brokers and NameServers",
    "access": "Users and rights",
    "nameserver": "The NameServer",
}


def page() -> str:
    """The whole page."""
    text = HEAD
    for table, config in TABLES.items():
        text += f"\n## {TITLES[table]}: `[{table}]`\n\n"
        text += "| Setting | Default | | What it is | In broker.conf |\n|---|---|---|---|---|\n"
        for setting in settings_of(config):
            doc = setting.doc
            live = "live" if doc.live else "fixed"
            what = doc.text.replace("|", "\\|")
            default = _default(setting.name, setting.default)
            text += f"| `{setting.name}` | {default} | {live} | {what} | {_apache(doc)} |\n"
    return text


def _apache(doc: Doc) -> str:
    if not doc.apache:
        return ""
    return f"`{doc.apache}`" + (f" ({doc.form})" if doc.form else "")


def _default(name: str, value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        if "port" in name:
            return str(value)
        for shift, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
            if "bytes" in name and value >= 1 << shift and value % (1 << shift) == 0:
                return f"{value >> shift} {unit}"
        return f"{value:,}"
    return f"`{value}`" if value else "empty"


if __name__ == "__main__":
    PAGE.write_text(page())
