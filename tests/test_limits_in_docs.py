"""The numbers in the docs are those of the code.

A row names a page, a fragment of it with a place for each figure, and the constants or default
settings that belong there. A changed constant fails here, and so does a sentence that was lost.
"""

from pathlib import Path

import pytest

from penstock.broker.admin.group_admin import RETRY_DELAYS_MAX, TEXT_CHARS_MAX
from penstock.broker.admin.group_admin import SUBSCRIPTIONS_MAX as GROUP_SUBSCRIPTIONS_MAX
from penstock.broker.admin.large_requests import PAGE_MAX
from penstock.broker.admin.large_requests import QUEUES_MAX as STATISTICS_QUEUES_MAX
from penstock.broker.auth.users import (
    PASSWORD_BYTES_MAX,
    RULES_MAX,
    USER_NAME_MAX,
    USER_RULES_MAX,
    USERS_MAX,
)
from penstock.broker.consumers.assignment import ASSIGNED_MAX, MODES_MAX
from penstock.broker.consumers.client_groups import CLIENT_ID_MAX
from penstock.broker.consumers.clients import (
    MEMBERSHIPS_MAX,
    MEMBERSHIPS_PER_CLIENT_MAX,
    MEMORY_PER_CLIENT_MAX,
    SUBSCRIPTIONS_MEMORY_MAX,
)
from penstock.broker.consumers.groups import FORBIDDEN_MAX
from penstock.broker.consumers.heartbeat_limits import BODY_BYTES_MAX as HEARTBEAT_BYTES_MAX
from penstock.broker.consumers.heartbeat_limits import (
    GROUPS_MAX,
    NAME_CHARS_MAX,
    SUBSCRIPTIONS_MAX,
    TAGS_CHARS_MAX,
)
from penstock.broker.consumers.queue_locks import LOCKS_MAX
from penstock.broker.consumers.queue_locks import QUEUES_MAX as LOCKED_QUEUES_MAX
from penstock.broker.delay.delay_levels import RETRY_MS as DELAY_RETRY_MS
from penstock.broker.delay.delay_levels import TICK_BYTES_MAX as DELAY_TICK_BYTES
from penstock.broker.delay.delay_levels import TICK_MESSAGES_MAX as DELAY_TICK_MESSAGES
from penstock.broker.delay.timers import PROPERTIES_SPARE
from penstock.broker.delay.timers import RETRY_MS as TIMER_RETRY_MS
from penstock.broker.delay.timers import TICK_BYTES_MAX as TIMER_TICK_BYTES
from penstock.broker.delay.timers import TICK_MESSAGES_MAX as TIMER_TICK_MESSAGES
from penstock.broker.filter.filter_parser import CHARS_MAX, DEPTH_MAX
from penstock.broker.filter.filtered_read import CHEAP_TESTS, EXAMINED_IN_THREAD_MAX, EXAMINED_MAX
from penstock.broker.pop.checkpoints import CHECKPOINT_MESSAGES_MAX
from penstock.broker.pop.pop_ack import BATCHES_MAX
from penstock.broker.pop.pop_polling import QUEUES_PER_STEP
from penstock.broker.pop.pop_request import (
    INVISIBLE_MS_MAX,
    MESSAGES_MAX,
    NEWEST_QUEUES_MAX,
    WAIT_MS_MAX,
)
from penstock.broker.pull.pull_message import SUSPEND_MS_MAX
from penstock.broker.query import ENTRIES_MAX as VIEW_ENTRIES_MAX
from penstock.broker.query import UNIQUE_MAX
from penstock.broker.request_reply import PUSH_MS
from penstock.broker.retry.consumer_send_back import FIRST_LEVEL
from penstock.broker.topics import QUEUES_MAX
from penstock.broker.transaction.check_back import CHECKS_IN_FLIGHT_MAX, MOVE_AFTER, RECONNECT_MS
from penstock.broker.transaction.half_messages import OUTCOMES_MAX
from penstock.cli.servers.supervisor import DELAY_S, DELAY_S_MAX
from penstock.cli.servers.up_command import BROKERS_MAX
from penstock.config import Settings, delays_ms
from penstock.controller.broker_set import HISTORY_MAX
from penstock.controller.broker_set import REPLICAS_MAX as CONTROLLER_REPLICAS_MAX
from penstock.controller.controller import NAME_CHARACTERS_MAX, NAMES_MAX
from penstock.nameserver.kv_config import KEY_CHARS_MAX, TOTAL_CHARS_MAX, VALUE_CHARS_MAX
from penstock.replication.agreed_replicas import ABSENT_MS
from penstock.server.answer_executor import (
    SUSPENDED_MAX,
    SUSPENDED_PER_CLIENT_MAX,
)
from penstock.server.client_calls import CLIENT_CALLS_MAX, CLIENT_CALLS_PER_CLIENT_MAX
from penstock.server.connection import FRAME_MS_MAX, IN_FLIGHT_MAX, PROGRESS_BYTES
from penstock.server.controller.etcd.controller_lease import TTL_S as CONTROLLER_TTL_S
from penstock.server.controller.etcd.etcd_backend import SILENT_MS
from penstock.server.controller.etcd.etcd_watch import TICK_MS
from penstock.server.controller.liveness import GRACE_MS
from penstock.server.controller.living_replicas import REPLICAS_MAX as HEARD_REPLICAS_MAX
from penstock.server.group_notifications import AT_ONCE_MAX, PAUSE_MS
from penstock.server.listener import FIRST_BYTE_MS, HANDSHAKE_SECONDS, REFRESH_MS, WAITING_MAX
from penstock.server.memory_limit import REPORT_MS, SOFT_SHARE
from penstock.server.replication.master_service import JOIN_MS
from penstock.server.server import SLOW_READ_MS
from penstock.store.commitlog import STEP_BYTES_MAX
from penstock.store.consumequeue.consumequeue import ALLOCATE_BYTES, BLOCK_BYTES
from penstock.store.lookup import QUERY_MAX
from penstock.store.recovery.checkpoint import PAGE_BYTES, SLACK_MS
from penstock.store.segment import FIRST_BYTES
from penstock.store.store import PREPARED_MAX
from penstock.store.timer.timer_log import UNIT_BYTES
from penstock.wire.bodies.client_bodies import SubscriptionGroupConfig
from penstock.wire.codes import GROUP_CHARS_MAX, TOPIC_CHARS_MAX
from penstock.wire.frame import FRAME_BYTES_MAX
from penstock.wire.layout import INDEX_HEADER_BYTES
from penstock.wire.record import PROPERTIES_BYTES_MAX, TOPIC_BYTES_MAX

DOCS = Path(__file__).parent.parent / "docs"
DEFAULTS = Settings()
BROKER, STORE, SERVER = DEFAULTS.broker, DEFAULTS.store, DEFAULTS.server

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
SECOND_MS, MINUTE_MS = 1_000, 60_000
DAY_S = 86_400

Row = tuple[str, str, tuple[float, ...]]


def whole(value: int, unit: int) -> int:
    """The value in this unit, which has to fit."""
    count, rest = divmod(value, unit)
    assert rest == 0, f"{value} is not a multiple of {unit}"
    return count


CONTROLLER_ROWS: list[Row] = [
    ("controller.md", "Names and addresses have at most {} characters, and a broker set at most {}",
     (NAME_CHARACTERS_MAX, CONTROLLER_REPLICAS_MAX)),
    ("controller.md", "accepts heartbeats of {:,} replicas, and a request names at most {:,}",
     (HEARD_REPLICAS_MAX, NAMES_MAX)),
    ("controller.md", "The last {} elections", (HISTORY_MAX,)),
    ("controller.md", "lease of {} s", (CONTROLLER_TTL_S,)),
    ("controller.md", "For {} s it presumes", (whole(GRACE_MS, SECOND_MS),)),
    ("controller.md", "writes one small key every {} s", (whole(TICK_MS, SECOND_MS),)),
    ("controller.md", "A controller that has not reached etcd for {} s", (CONTROLLER_TTL_S,)),
    ("failover.md", "does the same for its first {} s", (whole(JOIN_MS, SECOND_MS),)),
    ("failover.md", "For its first {} s, a new master", (whole(JOIN_MS, SECOND_MS),)),
    ("failover.md", "about a second if its process has ended, up to `lag_ms_max` ({} s)",
     (whole(DEFAULTS.replication.lag_ms_max, SECOND_MS),)),
    ("failover.md", "FLUSH_SLAVE_TIMEOUT after `slave_timeout_ms` ({} s)",
     (whole(DEFAULTS.replication.slave_timeout_ms, SECOND_MS),)),
    ("failover.md", "every {} ms (`heartbeat_ms`)", (DEFAULTS.replication.heartbeat_ms,)),
    ("failover.md", "A controller that has not reached etcd for {} s", (CONTROLLER_TTL_S,)),
    ("metrics.md", "if etcd has not answered for {} s", (whole(SILENT_MS, SECOND_MS),)),
]  # fmt: skip

BROKER_ROWS: list[Row] = [
    ("broker.md", "asks for, at most {} ", (BROKER.default_topic_queues,)),
    ("broker.md", "at most {:,} messages or {} KiB (`pull_messages_max`, `pull_bytes_max`)",
     (BROKER.pull_messages_max, whole(BROKER.pull_bytes_max, KIB))),
    ("broker.md", "as long as the client asks, at most {} s", (whole(SUSPEND_MS_MAX, SECOND_MS),)),
    ("order.md", "A broker has at most {:,} locks", (LOCKS_MAX,)),
    ("broker.md", "{:,} queues in one request for locks, {:,} locks in all",
     (LOCKED_QUEUES_MAX, LOCKS_MAX)),
    ("broker.md", "statistics, correction or reset of {:,} queues", (STATISTICS_QUEUES_MAX,)),
    ("broker.md", "| {:,} queues of a topic that POP groups read", (NEWEST_QUEUES_MAX,)),
    ("broker.md", "| {:,} queues in the assignment of one consumer", (ASSIGNED_MAX,)),
    ("broker.md", "| {} retry delays, {:,} subscriptions and {:,} characters of subscriptions",
     (RETRY_DELAYS_MAX, GROUP_SUBSCRIPTIONS_MAX, TEXT_CHARS_MAX)),
    ("broker.md", "| {:,} topics that groups may not read, {:,} request modes",
     (FORBIDDEN_MAX, MODES_MAX)),
    ("broker.md", "| {:,} queues of all topics", (BROKER.queues_max,)),
    ("security.md", "A username has at most {} printable characters, a password at most {:,} bytes",
     (USER_NAME_MAX, PASSWORD_BYTES_MAX)),
    ("nameserver.md", "at most {:,} characters, a value {:,}, and all entries together {} MiB",
     (KEY_CHARS_MAX, VALUE_CHARS_MAX, whole(TOTAL_CHARS_MAX, MIB))),
    ("broker.md", "{:,} users, {:,} rules of one user, {:,} rules in all",
     (USERS_MAX, USER_RULES_MAX, RULES_MAX)),
    ("security.md", "A broker has at most {:,} users. A user has at most {:,} rules",
     (USERS_MAX, USER_RULES_MAX)),
    ("broker.md", "`lock_lease_ms` ({} s)", (whole(BROKER.lock_lease_ms, SECOND_MS),)),
    ("broker.md", "`offset_persist_ms` ({} s)", (whole(BROKER.offset_persist_ms, SECOND_MS),)),
    ("broker.md", "Topic names have at most {} characters, group names {}.",
     (TOPIC_CHARS_MAX, GROUP_CHARS_MAX)),
    ("broker.md", "A topic has at most {:,} queues", (QUEUES_MAX,)),
    ("broker.md", "All members of a group of up to {} are notified at once", (AT_ONCE_MAX,)),
    ("broker.md", "and then not again for {} ms", (PAUSE_MS,)),
    ("broker.md", "frame {} MiB, header {} MiB",
     (whole(SERVER.frame_bytes_max, MIB), whole(SERVER.header_bytes_max, MIB))),
    ("broker.md", "| response {} MiB, the most", (whole(FRAME_BYTES_MAX, MIB),)),
    ("broker.md", "in pages of {:,}", (PAGE_MAX,)),
    ("broker.md", "| {:,} topics, {:,} groups |", (BROKER.topics_max, BROKER.groups_max)),
    ("broker.md", "| {:,} topics and groups created automatically", (BROKER.auto_creations_max,)),
    ("broker.md", "| body {} MiB | `body_bytes_max`", (whole(STORE.body_bytes_max, MIB),)),
    ("broker.md", "properties {:,} bytes, topic {} bytes",
     (PROPERTIES_BYTES_MAX, TOPIC_BYTES_MAX)),
    ("broker.md", "| {:,} connections |", (SERVER.connections_max,)),
    ("broker.md", "| {} minutes without traffic", (whole(SERVER.idle_ms, MINUTE_MS),)),
    ("broker.md", "| {} MiB of unsent responses", (whole(SERVER.output_bytes_max, MIB),)),
    ("broker.md", "| {} requests of one connection in the thread pool", (IN_FLIGHT_MAX,)),
    ("broker.md", "| {} MiB of unfinished requests", (whole(SERVER.memory_bytes_max, MIB),)),
    ("broker.md", "less than {} KiB of an", (whole(PROGRESS_BYTES, KIB),)),
    ("broker.md", "is not complete after {} s", (whole(FRAME_MS_MAX, SECOND_MS),)),
    ("broker.md", "logged at WARNING every {} s", (whole(REPORT_MS, SECOND_MS),)),
    ("broker.md", "| {:,} suspended pulls, {:,} of one connection",
     (SUSPENDED_MAX, SUSPENDED_PER_CLIENT_MAX)),
    ("broker.md", "| {:,} requests that wait for a client's response, {:,} for one client",
     (CLIENT_CALLS_MAX, CLIENT_CALLS_PER_CLIENT_MAX)),
    ("broker.md", "| {:,} open half messages", (BROKER.open_transactions_max,)),
    ("broker.md", "| {} messages by key, {} by unique id", (QUERY_MAX, UNIQUE_MAX)),
    ("broker.md", "| {:,} entries in one view of a queue", (VIEW_ENTRIES_MAX,)),
    ("broker.md", "| heartbeat of {} MiB, {:,} groups, {:,} subscriptions and tags",
     (whole(HEARTBEAT_BYTES_MAX, MIB), GROUPS_MAX, SUBSCRIPTIONS_MAX)),
    ("broker.md", "| {:,} groups of one connection in its recent heartbeats, {:,} of all",
     (MEMBERSHIPS_PER_CLIENT_MAX, MEMBERSHIPS_MAX)),
    ("broker.md", "| in a heartbeat: client id {:,} characters, name of a group or topic {}, tags "
     "of a subscription {:,}, SQL92 filter {:,}",
     (CLIENT_ID_MAX, NAME_CHARS_MAX, TAGS_CHARS_MAX, CHARS_MAX)),
    ("broker.md", "| {} MiB of names and subscriptions of one connection, {} MiB of subscriptions",
     (whole(MEMORY_PER_CLIENT_MAX, MIB), whole(SUBSCRIPTIONS_MEMORY_MAX, MIB))),
    ("broker.md", "| {} % disk usage", (STORE.disk_refuse_percent,)),
    ("broker.md", "until the usage is below {} %", (STORE.disk_force_percent,)),
    ("broker.md", "A pull is suspended for at most {} s.", (whole(SUSPEND_MS_MAX, SECOND_MS),)),
    ("broker.md", "{:,} messages per pull", (BROKER.pull_messages_max,)),
    ("broker.md", "up to {} days ahead. Recall is on", (whole(STORE.timer_delay_s_max, DAY_S),)),
]  # fmt: skip

DELAY_ROWS: list[Row] = [
    ("delay.md", "one of {} delay levels", (len(delays_ms(STORE.delay_levels)),)),
    ("delay.md", "At most {} messages or {} MiB are delivered at a time",
     (DELAY_TICK_MESSAGES, whole(DELAY_TICK_BYTES, MIB))),
    ("delay.md", "tries again every {} ms", (DELAY_RETRY_MS,)),
    ("timers.md", "any millisecond of the next {} days", (whole(STORE.timer_delay_s_max, DAY_S),)),
    ("timers.md", "longer than {:,} bytes", (PROPERTIES_BYTES_MAX - PROPERTIES_SPARE,)),
    ("timers.md", "an entry of {} bytes", (UNIT_BYTES,)),
    ("timers.md", "{} messages or {} MiB are delivered at a time",
     (TIMER_TICK_MESSAGES, whole(TIMER_TICK_BYTES, MIB))),
    ("timers.md", "tries again every {} ms", (TIMER_RETRY_MS,)),
    ("transactions.md", "is not checked for {} s",
     (whole(BROKER.transaction_timeout_ms, SECOND_MS),)),
    ("transactions.md", "is asked every {} s", (whole(BROKER.transaction_check_ms, SECOND_MS),)),
    ("transactions.md", "After {} counted checks", (BROKER.transaction_checks_max,)),
    ("transactions.md", "At most {:,} half messages", (BROKER.open_transactions_max,)),
    ("transactions.md", "At most {} checks of one connection", (CHECKS_IN_FLIGHT_MAX,)),
    ("transactions.md", "resolutions of the last {:,} half messages", (OUTCOMES_MAX,)),
    ("transactions.md", "more than {:,} others", (MOVE_AFTER,)),
]  # fmt: skip

CONSUMING_ROWS: list[Row] = [
    ("pop.md", "a pop looks at {} queues at a time", (QUEUES_PER_STEP,)),
    ("pop.md", "the number of messages, at most {}", (MESSAGES_MAX,)),
    ("pop.md", "the invisible time in ms, at most {} days",
     (whole(INVISIBLE_MS_MAX, DAY_S * SECOND_MS),)),
    ("pop.md", "waits for messages, at most {} minutes", (whole(WAIT_MS_MAX, MINUTE_MS),)),
    ("pop.md", "Of 100 pops, {} look there first", (BROKER.pop_retry_percent,)),
    ("pop.md", "| {} messages, {} KiB |", (MESSAGES_MAX, whole(BROKER.pull_bytes_max, KIB))),
    ("pop.md", "| {:,} open POP checkpoints", (BROKER.pop_batches_max,)),
    ("pop.md", "| {:,} entries, and {} messages in each, in one BATCH_ACK_MESSAGE",
     (BATCHES_MAX, CHECKPOINT_MESSAGES_MAX)),
    ("pop.md", "| {:,} messages of a queue in flight", (BROKER.pop_in_flight_max,)),
    ("pop.md", "| {:,} waiting requests; {:,} of one group, topic and queue",
     (BROKER.pop_waiting_max, BROKER.pop_waiting_per_queue_max)),
    ("pop.md", "an invisible time of {} days", (whole(INVISIBLE_MS_MAX, DAY_S * SECOND_MS),)),
    ("order.md", "`lock_lease_ms` ({} s)", (whole(BROKER.lock_lease_ms, SECOND_MS),)),
    ("retry.md", "up to 2 hours, {} times", (SubscriptionGroupConfig().retry_max_times,)),
    ("retry.md", "the first retry uses level {}", (FIRST_LEVEL,)),
    ("filters.md", "at most {:,} characters and {} levels of nesting", (CHARS_MAX, DEPTH_MAX)),
    ("filters.md", "at most {} messages in the event loop, and at most {} in the threads",
     (EXAMINED_MAX, EXAMINED_IN_THREAD_MAX)),
    ("filters.md", "more than {} conditions", (CHEAP_TESTS,)),
    ("request-reply.md", "did not respond within {} s", (whole(PUSH_MS, SECOND_MS),)),
    ("trace.md", "the newest {} in the time range", (QUERY_MAX,)),
    ("trace.md", "the newest {} |", (UNIQUE_MAX,)),
]  # fmt: skip

SERVER_ROWS: list[Row] = [
    ("security.md", "checks the files every {} seconds", (whole(REFRESH_MS, SECOND_MS),)),
    ("security.md", "sends nothing for {} s", (whole(FIRST_BYTE_MS, SECOND_MS),)),
    ("security.md", "finish the handshake within {:.0f} s", (HANDSHAKE_SECONDS,)),
    ("security.md", "At most {:,} connections may be in that state", (WAITING_MAX,)),
    ("nameserver.md", "registers, every {} s", (whole(BROKER.register_ms, SECOND_MS),)),
    ("running.md", "`--nameserver-port PORT` | {} |", (DEFAULTS.nameserver.port,)),
    ("running.md", "`--broker-port PORT` | {} |", (BROKER.port,)),
    ("running.md", "in the cluster `DefaultCluster`, at most {};", (BROKERS_MAX,)),
    ("running.md", "delays that double up to {:.0f} s", (DELAY_S_MAX,)),
    ("running.md", "take longer than {} ms", (SLOW_READ_MS,)),
    ("running.md", "`stop_ms`, {} s", (whole(SERVER.stop_ms, SECOND_MS),)),
]  # fmt: skip

STORE_ROWS: list[Row] = [
    ("store.md", "in steps ({} KiB for a new queue, then {} KiB)",
     (whole(BLOCK_BYTES, KIB), whole(ALLOCATE_BYTES, KIB))),
    ("store.md", "`queue_rest_ms` ({:,};", (STORE.queue_rest_ms,)),
    ("store.md", "`queues_mapped_max` ({:,})", (STORE.queues_mapped_max,)),
    ("store.md", "a new topic's first {} queues", (PREPARED_MAX,)),
    ("store.md", "a header of {} bytes", (INDEX_HEADER_BYTES,)),
    ("store.md", "The checkpoint file has {:,} bytes", (PAGE_BYTES,)),
    ("store.md", "(minus {} seconds)", (whole(SLACK_MS, SECOND_MS),)),
    ("store.md", "`disk_clean_percent` ({})", (STORE.disk_clean_percent,)),
    ("store.md", "`disk_force_percent` ({})", (STORE.disk_force_percent,)),
    ("store.md", "`disk_refuse_percent` ({})", (STORE.disk_refuse_percent,)),
    ("migration.md", "most {} MiB more than it holds", (2 * STEP_BYTES_MAX >> 20,)),
    ("store.md", "at least {} MiB and at most {} MiB. A message is written only",
     (FIRST_BYTES >> 20, 2 * STEP_BYTES_MAX >> 20)),
    ("migration.md", "rolled back after {} counted checks", (BROKER.transaction_checks_max,)),
    ("migration.md", "up to {} days ahead", (whole(STORE.timer_delay_s_max, DAY_S),)),
]  # fmt: skip

ROWS = [*CONTROLLER_ROWS, *BROKER_ROWS, *DELAY_ROWS, *CONSUMING_ROWS, *SERVER_ROWS, *STORE_ROWS]


@pytest.mark.parametrize(("page", "fragment", "figures"), ROWS)
def test_numbers_in_the_docs_equal_those_of_the_code(
    page: str, fragment: str, figures: tuple[float, ...]
) -> None:
    text = " ".join((DOCS / page).read_text().split())
    assert fragment.format(*figures).strip() in text, f"docs/{page} is out of date"


def test_numbers_written_as_words_equal_those_of_the_code() -> None:
    assert ABSENT_MS == SECOND_MS, "docs/failover.md: about a second if its process has ended"
    assert DELAY_S == 0.5, "docs/running.md: restarted first after half a second"
    assert SOFT_SHARE == 0.75, "docs/broker.md: three quarters of memory_bytes_max"
    assert RECONNECT_MS == MINUTE_MS, "docs/transactions.md: at least one minute to reconnect"
    assert STORE.timer_roll_slots * STORE.timer_precision_ms == 2 * DAY_S * SECOND_MS, (
        "docs/timers.md: timer_roll_slots are two days"
    )


def cells(page: str, first: str) -> list[str]:
    """The cells of a row that begins with `first`, without spaces."""
    lines = (DOCS / page).read_text().splitlines()
    row = next(line for line in lines if line.startswith(f"| {first} |"))
    return [cell.replace(" ", "") for cell in row.strip("| ").split("|")[1:]]


def test_tables_of_delay_levels_equal_those_of_the_code() -> None:
    levels = STORE.delay_levels.split()
    assert cells("delay.md", "Delay") == levels
    assert cells("retry.md", "after") == levels[FIRST_LEVEL - 1 :]
