"""The commands of mqadmin that must work, in an order in which they have something to show.

Each step is a command line and what it must say: facts are lines as `mqadmin_text` makes them, and
`code` is that of the refusal where one is due. A full comparison of what Apache's servers and ours
print goes by lines, except for those that match `varies`: the accepted differences.
"""

from __future__ import annotations

from dataclasses import dataclass

RATES = r".*TPS.*|Orders \S+ \d+ .*"
"""Messages per second depend on when the sampling starts."""
PROGRESS = RATES + "|%RETRY%.*"
"""And a client commits its place in the empty retry topic when it likes."""
PLACE = "CommitLog Offset: .*|MessageTrack .*"
"""How much the log has before it depends on the sizes of traces; who is not online is told in each
server's own words."""
INDEXED = "ID .*"
"""So do the places that keys lead to."""


@dataclass(frozen=True)
class Step:
    """One command. Words in braces are filled in: names, broker, and what `save` has kept."""

    line: str
    facts: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()
    code: int | None = None
    apache_code: int | None = None  # where Apache gives another code; 0: where it lets it pass
    varies: str = ""
    save: str = ""  # the printed words can be used later: as {NAME0}, {NAME1}, …
    again: bool = False  # repeat until it says the facts
    enough: str = ""  # for a command that goes on forever
    settings: bool = False  # prints settings: compared by name, those that both have


def step(line: str, *facts: str, **options: str | int | bool | tuple[str, ...]) -> Step:
    return Step(line, facts, **options)  # type: ignore[arg-type]


SETTINGS_VARY = (
    # Where each listens and keeps its files, and the small files of the peer in tests.
    "bindAddress|listenPort|haListenPort|kvConfigPath|storePath.*|mappedFileSize.*|maxHashSlotNum"
    "|maxIndexNum"
    # A pull here brings what the client asked for, up to a size; Apache stops at 32 messages.
    "|maxTransfer.*"
    # Queues are flushed by a step of our own.
    "|flushIntervalConsumeQueue"
    # Frames to slaves are larger.
    "|haTransferBatchSize"
)


def produce(name: str, queue: int, body: str, keys: str, tag: str) -> Step:
    return step(f"+produce sellers Orders {queue} {body} '{keys}' {tag}", save=name)


SERVERS = (
    step("clusterList", "DefaultCluster broker-a 0 BROKER VERSION 0.00(0,0ms) 0.00(0,0ms|0,0ms) "
         "…-0(0.0w, 0.0, 0.0) 0 … true",
         # Seconds behind the second now under way, hours since the first message, of which there is
         # none, and the disk's use.
         varies=".*"),
    step("clusterList -m", "DefaultCluster broker-a 0 0 0 0"),
    *(
        step(f"brokerStatus {where}", f"{mark}brokerActive : true",
             f"{mark}brokerVersionDesc : VERSION", f"{mark}msgPutTotalTodayNow : 0",
             f"{mark}commitLogMaxOffset : 0", f"{mark}sendThreadPoolQueueSize : 0",
             # The disk's figures, the time; ours says its own version besides. Of an empty store
             # Apache says that it begins at -1, and of puts that there was one.
             varies=".*(commitLogDi|consumeQueueDiskRatio|runtime|EntireTimeMax|commitLogMinOffset"
                    "|putMessageTimesTotal|penstock[A-Z]|timerReadBehind).*")
        for where, mark in (("-b {broker}", ""), ("-c {cluster}", "BROKER "))
    ),
    step("topicList", "TBW102", "SELF_TEST_TOPIC", "broker-a", "DefaultCluster", "BenchmarkTest",
         "SCHEDULE_TOPIC_XXXX", "OFFSET_MOVED_EVENT", "RMQ_SYS_TRACE_TOPIC"),
)  # fmt: skip

TOPICS = (
    step("topicRoute -t Missing", code=17),
    step("topicStatus -t Missing", code=17),
    step("updateTopic -c {cluster} -t Orders -r 2 -w 2", "create topic to BROKER success.",
         "TopicConfig [topicName=Orders, readQueueNums=2, writeQueueNums=2, perm=RW-, …"),
    step("updateTopic -b {broker} -t Bills -r 1 -w 1 -a +message.type=FIFO",
         "create topic to BROKER success."),
    # Ours says that the parameter is wrong, Apache that the system failed.
    step("updateTopic -b {broker} -t Bad -a +no.such=1", code=29, apache_code=1),
    step("updateTopic -b {broker} -t 'a b'", code=29),
    step("topicList", "Orders", "Bills", absent=("Bad",)),
    step("topicList -c", "DefaultCluster Orders", "DefaultCluster Bills"),
    step("topicRoute -t Orders", '0:"BROKER"', '"brokerName":"broker-a",', '"perm":6,',
         '"readQueueNums":2,', '"writeQueueNums":2'),
    step("topicRoute -l -t Orders", "DefaultCluster broker-a {0=BROKER} 2 2 6", "Total: 1 2 2"),
    step("topicStatus -t Orders", "broker-a 0 0 0", "broker-a 1 0 0"),
    step("topicClusterList -t Orders", "DefaultCluster"),
    step("updateTopicPerm -c {cluster} -t Orders -p 4",
         "update topic perm from 6 to 4 in BROKER success."),
    step("topicRoute -t Orders", '"perm":4,'),
    step("updateTopicPerm -b {broker} -t Orders -p 6",
         "update topic perm from 4 to 6 in BROKER success."),
    step("updateTopicPerm -b {broker} -t Orders -p 6", "new perm equals to the old one!"),
    step("allocateMQ -t Orders -i 10.0.0.1,10.0.0.2", '{"result":{"10.0.0.2":[{"brokerName":'
         '"broker-a","queueId":0,"topic":"Orders"}],"10.0.0.1":[{"brokerName":"broker-a",'
         '"queueId":1,"topic":"Orders"}]}}'),
)  # fmt: skip

FIRST = ("Topic: Orders", "Tags: [red]", "Keys: [key-1]", "Queue ID: 0", "Queue Offset: 0",
         "CommitLog Offset: 0", "Reconsume Times: 0", "Store Host: BROKER", "System Flag: 0",
         "Properties: {MSG_REGION=DefaultRegion, UNIQ_KEY=ID, CLUSTER=DefaultCluster, TAGS=red, "
         "KEYS=key-1, WAIT=true, TRACE_ON=true}")  # fmt: skip

MESSAGES = (
    produce("first", 0, "first", "key-1", "red"),
    produce("second", 1, "second", "key-2", "blue"),
    produce("third", 0, "third", "key-1 key-3", "blue"),
    produce("fourth", 1, "fourth", "key-4", "red"),
    step("sendMessage -t Orders -p fifth -k key-5 -c green -b broker-a -i 1",
         "broker-a 1 SEND_OK ID"),
    # The topic is created by the send; the queue is the client's choice.
    step("sendMessage -t Fresh -p sixth", "broker-a … SEND_OK ID", varies="broker-a .*"),
    step("topicStatus -t Orders", "broker-a 0 0 2 TIME", "broker-a 1 0 3 TIME", varies=RATES),
    step("queryMsgById -t Orders -i {first1}", "OffsetID: ID", *FIRST, "WARN: No Consumer"),
    step("queryMsgById -t Orders -i {first0}", "OffsetID: ID", *FIRST),
    step("queryMsgById -t Orders -i {beyond}", code=208),
    step("queryMsgByKey -t Orders -k key-1", "ID 0 0 …", "ID 0 1 …", absent=("ID 1 …",)),
    step("queryMsgByKey -t Orders -k key-9", code=208),
    step("queryMsgByKey -t Orders -k red -p T", "ID 0 0 …", "ID 1 1 …"),
    step("queryMsgByUniqueKey -t Orders -i {second0}", "Keys: [key-2]", "Queue ID: 1"),
    step("queryMsgByUniqueKey -t Orders -i {second0} -a", "Keys: [key-2]", "Queue ID: 1"),
    step("queryMsgByUniqueKey -t Orders -i 7F0000010000000000000000FFFFFFFF", code=208),
    step("queryMsgByOffset -t Orders -b broker-a -i 0 -o 1", "Keys: [key-1 key-3]",
         "Queue Offset: 1", "Properties: … MIN_OFFSET=0, … MAX_OFFSET=2}"),
    step("queryMsgByOffset -t Orders -b broker-a -i 0 -o 100", absent=("Topic: …",)),
    step("printMsg -t Orders -d true", "minOffset=0, maxOffset=3, … queueId=1]",
         "MSGID: ID … BODY: first", "MSGID: ID … BODY: fifth"),
    step("printMsg -t Orders -s red -d true", "… BODY: first", "… BODY: fourth",
         absent=("… BODY: second",)),
    step("printMsgByQueue -t Orders -a broker-a -i 0 -p true -d true -f true", "… BODY: first",
         "… BODY: third", "Tag: red Count: 1", "Tag: blue Count: 1", absent=("… BODY: second",)),
    step("consumeMessage -t Orders", "… BODY: fourth",
         "MessageQueue [… queueId=1] print msg finished. status=NO_NEW_MSG, offset=3"),
    step("consumeMessage -t Orders -b broker-a -i 0 -o 1 -c 1", "… BODY: third",
         absent=("… BODY: first",)),
    step("queryCq -t Orders -q 0 -i 0 -b {broker}", "max: 2, min: 0",
         "ConsumeQueueData{physicOffset=0, physicSize=260, tagsCode=112785, …"),
)  # fmt: skip

GROUPS = (
    step("updateSubGroup -c {cluster} -g buyers -r 3 -q 2",
         "create subscription group to BROKER success."),
    step("updateSubGroup -b {broker} -g listeners -d true",
         "create subscription group to BROKER success."),
    step("getConsumerConfig -g buyers", "groupName = buyers", "retryQueueNums = 2",
         "retryMaxTimes = 3", "consumeEnable = true", "consumeBroadcastEnable = false"),
    step("getConsumerConfig -g nobody", absent=("groupName = …",)),
    step("consumerProgress -g buyers", code=17),
    step("consumerConnection -g buyers", code=17),
    step("consumerStatus -g buyers", code=17),
)  # fmt: skip

CLIENTS = (
    step("producerConnection -g sellers -t Orders", "0001 CLIENT@sellers ADDRESS JAVA VERSION"),
    step("producerConnection -g nobody -t Orders", code=1),
    step("+consume buyers Orders * CLUSTERING"),
    step("+consume listeners Orders 'red || blue' BROADCASTING"),
    step("+consumed buyers 5"),
    step("+consumed listeners 4"),
    step("consumerProgress -g buyers", "Orders broker-a 0 2 2 0 0 TIME",
         "Orders broker-a 1 3 3 0 0 TIME", "Consume Diff Total: 0", "Consume Inflight Total: 0",
         again=True, varies=PROGRESS),
    step("consumerProgress -g buyers -t Orders -s true", "Orders broker-a 0 2 2 … 0 0 TIME",
         varies=PROGRESS),
    step("consumerProgress", "buyers 1 VERSION PUSH CLUSTERING 0 0",
         "listeners 1 VERSION PUSH BROADCASTING 0 0"),
    step("consumerProgress -g nobody", code=17),
    step("consumerStatus -g buyers", "1 CLIENT@buyers VERSION MS/CLIENT@buyers", "Rebalance OK",
         "Same subscription in the same group of consumer"),
    step("consumerStatus -g buyers -i {client}@buyers", "PROP_CONSUME_TYPE : CONSUME_PASSIVELY",
         # How long each thing takes, and where the client got its addresses from.
         varies=".*"),
    step("consumerStatus -g buyers -i nobody@home", code=1),
    step("consumerConnection -g buyers", "CLIENT@buyers ADDRESS JAVA VERSION", "Orders *",
         "%RETRY%buyers *", "ConsumeType: CONSUME_PASSIVELY", "MessageModel: CLUSTERING",
         "ConsumeFromWhere: CONSUME_FROM_FIRST_OFFSET"),
    step("consumerConnection -g listeners", "Orders red || blue", "MessageModel: BROADCASTING"),
    step("consumerConnection -g nobody", code=17),
    step("producer -b {broker}", "producer group (sellers) instance : clientId=CLIENT@sellers,…"),
    step("brokerConsumeStats -b {broker}", "Orders buyers broker-a 0 2 2 0 TIME",
         "Orders buyers broker-a 1 3 3 0 TIME", "Diff Total: 0"),
    step("queryMsgById -t Orders -i {first1}",
         "MessageTrack [consumerGroup=buyers, trackType=CONSUMED, exceptionDesc=null]",
         "MessageTrack [consumerGroup=listeners, trackType=CONSUME_BROADCASTING, "
         "exceptionDesc=null]"),
    step("queryMsgById -t Orders -i {first0} -g buyers -d {client}@buyers",
         "ConsumeMessageDirectlyResult [order=false, autoCommit=true, consumeResult=CR_SUCCESS, …",
         varies=".*"),  # the time it took
)  # fmt: skip

RESETS = (
    step("resetOffsetByTime -g buyers -t Orders -s 0", "broker-a 0 0", "broker-a 1 0"),
    step("+consumed buyers 11"),  # with the one that was consumed directly
    # Sampled every ten seconds: by now it has been.
    step("statsAll -t Orders", "Orders buyers … 5 10", again=True, varies=RATES),
    step("statsAll -a", "Fresh 0 … 1 NO_CONSUMER", varies=RATES + "|Fresh .*"),
    step("skipAccumulatedMessage -g buyers -t Orders", "broker-a 0 2", "broker-a 1 3"),
    step("+leave buyers"),
    step("consumerProgress -g buyers", "Orders broker-a 0 2 2 0 … TIME",
         "Orders broker-a 1 3 3 0 … TIME", "Consume Diff Total: 0", varies=PROGRESS),
    step("resetOffsetByTime -g buyers -t Orders -s 0", "broker-a 0 0", "broker-a 1 0"),
    step("resetOffsetByTime -g buyers -t Orders -s now -b {broker} -q 0",
         "reset consumer offset to 2"),
    step("resetOffsetByTime -g buyers -t Orders -s 0 -b {broker} -q 0 -o 1",
         "reset consumer offset to 1"),
    step("consumerProgress -g buyers", "Orders broker-a 0 2 1 1 … TIME",
         "Orders broker-a 1 3 0 3 … N/A", "Consume Diff Total: 4",
         # After a reset Apache goes on calling in flight what had been pulled before it.
         varies=PROGRESS + "|Consume Inflight.*"),
    step("resetOffsetByTime -g sleepers -t Orders -s 0", code=26),
    step("resetOffsetByTime -g buyers -t Missing -s 0", code=17),
    step("skipAccumulatedMessage -g sleepers -t Orders", code=26),
    step("cloneGroupOffset -s buyers -d copies -t Orders", code=26),
    step("updateSubGroup -b {broker} -g copies", "create subscription group to BROKER success."),
    step("cloneGroupOffset -s buyers -d copies -t Orders", "clone group offset success. "
         "srcGroup[buyers], destGroup=[copies], topic[Orders]"),
    step("brokerConsumeStats -b {broker}", "Orders copies broker-a 0 2 1 1 …",
         "Diff Total: 8"),
)  # fmt: skip

BROKER = (
    step("checkMsgSendRT -t Orders -a 3 -s 10", "broker-a 0 true …", "broker-a 1 true …",
         varies="broker-a .*|Avg RT.*"),
    step("clusterRT -c {cluster} -a 3 -s 10 -i 30", "DefaultCluster broker-a … 3 0",
         enough=r"broker-a .* 3 +0", varies=".*"),
    step("sendMsgStatus -b broker-a -c 2", "rt=…ms, SendResult=SendResult [sendStatus=SEND_OK, …",
         varies="rt=.*"),
    step("getBrokerConfig -b {broker}", "brokerName = broker-a", "defaultTopicQueueNums = 8",
         "brokerClusterName = DefaultCluster", "autoCreateTopicEnable = true",
         "flushDiskType = ASYNC_FLUSH", "fileReservedTime = 72",
         settings=True),
    step("updateBrokerConfig -b {broker} -k flushDelayOffsetInterval -v 9999",
         "update broker config success, BROKER"),
    step("updateBrokerConfig -c {cluster} -k defaultTopicQueueNums -v 5",
         "update broker config success, BROKER"),
    step("updateBrokerConfig -b {broker} -k noSuchSetting -v x",
         "update broker config success, BROKER"),
    step("getBrokerConfig -c {cluster}", "defaultTopicQueueNums = 5", settings=True),
    step("wipeWritePerm -b broker-a", "wipe write perm of broker[broker-a] in name server[NAMES] "
         "OK, …"),
    step("topicRoute -t Orders", '"perm":4,'),
    step("addWritePerm -b broker-a", "add write perm of broker[broker-a] in name server[NAMES] "
         "OK, …"),
    step("topicRoute -t Orders", '"perm":6,'),
    step("wipeWritePerm -b nobody",
         "wipe write perm of broker[nobody] in name server[NAMES] OK, 0"),
    step("addWritePerm -b nobody", "add write perm of broker[nobody] in name server[NAMES] OK, 0"),
    step("cleanExpiredCQ -b {broker}", "success"),
    step("cleanExpiredCQ -c {cluster}", "success"),
    step("cleanUnusedTopic -b {broker}", "success"),
    step("deleteExpiredCommitLog -b {broker}", "success"),
    step("haStatus -b {broker}", "#MasterAddr BROKER", "#SlaveNum 0",
         varies="#MasterCommitLogMaxOffset.*"),  # clusterRT sent as it liked
)  # fmt: skip

NAMESERVER = (
    step("getNamesrvConfig", "orderMessageEnable = false", "deleteTopicWithBrokerRegistration = "
         "false", "scanNotActiveBrokerInterval = 5000", settings=True),
    step("updateNamesrvConfig -k orderMessageEnable -v true",
         "update name server config success![NAMES]", "orderMessageEnable : true"),
    step("getNamesrvConfig", "orderMessageEnable = true", settings=True),
    step("updateNamesrvConfig -k kvConfigPath -v elsewhere", code=16),
    step("updateNamesrvConfig -k noSuchSetting -v x", "noSuchSetting : x"),
    step("updateKvConfig -s drawer -k colour -v red",
         "create or update kv config to namespace success."),
    step("deleteKvConfig -s drawer -k colour", "delete kv config from namespace success."),
    step("deleteKvConfig -s drawer -k colour", "delete kv config from namespace success."),
    step("updateOrderConf -t Orders -m get", code=22),
    step("updateOrderConf -t Orders -m put -v broker-a:2",
         "update orderConf success. topic=[Orders], orderConf=[broker-a:2]"),
    step("updateOrderConf -t Orders -m get",
         "get orderConf success. topic=[Orders], orderConf=[broker-a:2]"),
    step("topicRoute -t Orders", '"orderTopicConf":"broker-a:2",'),
    step("updateOrderConf -t Orders -m delete", "delete orderConf success. topic=[Orders]"),
    step("updateOrderConf -t Orders -m get", code=22),
)  # fmt: skip

ACL = "User:alice Custom"

USERS = (
    step("createUser -b {broker} -u alice -p 12345678 -t Normal", "create user to BROKER success."),
    step("createUser -b {broker} -u alice -p 12345678", code=16),
    step("getUser -b {broker} -u alice", "alice … Normal enable"),
    step("getUser -c {cluster} -u nobody", absent=("nobody …",)),
    step("listUser -b {broker}", "alice … Normal enable", "root … Super enable"),
    step("listUser -b {broker} -f al", "alice … Normal enable", absent=("root …",)),
    step("updateUser -b {broker} -u alice -s disable", "update user to BROKER success."),
    step("updateUser -b {broker} -u nobody -s disable", code=16),
    step("getUser -b {broker} -u alice", "alice … Normal disable"),
    step("createAcl -c {cluster} -s User:alice -r Topic:Orders,Group:* -a Pub,Sub -i 10.0.0.0/8 "
         "-d Allow", "create acl to BROKER success."),
    step("createAcl -b {broker} -s User:nobody -r Topic:* -a Pub -d Deny", code=16),
    # Ours says what is wrong, Apache that the system failed.
    step("createAcl -b {broker} -s alice -r Topic:* -a Pub -d Deny", code=16, apache_code=1),
    step("createAcl -b {broker} -s User:alice -r Bad:* -a Pub -d Deny", code=16),
    step("createAcl -b {broker} -s User:alice -r Topic:* -a Fly -d Deny", code=16),
    step("createAcl -b {broker} -s User:alice -r Topic:* -a Pub -d Maybe", code=16),
    step("getAcl -b {broker} -s User:alice", f"{ACL} Topic:Orders [Pub, Sub] [10.0.0.0/8] Allow",
         f"{ACL} Group:* [Pub, Sub] [10.0.0.0/8] Allow"),
    step("getAcl -b {broker} -s User:nobody", code=16),
    step("listAcl -b {broker} -s User:alice -r Topic:Orders",
         f"{ACL} Topic:Orders [Pub, Sub] [10.0.0.0/8] Allow", absent=(f"{ACL} Group:* …",)),
    step("updateAcl -b {broker} -s User:alice -r Topic:Orders -a All -d Deny",
         "update acl to BROKER success."),
    step("listAcl -c {cluster}", f"{ACL} Topic:Orders [All] null Deny",
         f"{ACL} Group:* [Pub, Sub] [10.0.0.0/8] Allow"),
    step("deleteAcl -b {broker} -s User:alice -r Topic:Orders", "delete acl to BROKER success."),
    step("deleteAcl -b {broker} -s User:alice", "delete acl to BROKER success."),
    step("deleteAcl -b {broker} -s User:nobody", code=16),
    step("listAcl -b {broker}", absent=(f"{ACL} …",)),
    step("deleteUser -b {broker} -u alice", "delete user to BROKER success."),
    step("deleteUser -b {broker} -u nobody", "delete user to BROKER success."),
    step("listUser -b {broker}", absent=("alice …",)),
)  # fmt: skip

TRACES = (
    step("updateTopic -c {cluster} -t Kinds -r 1 -w 1", "create topic to BROKER success."),
    step("+trace tracers Kinds traced", save="traced"),
    step("+consume watchers Kinds * TRACED"),
    step("+consumed watchers 1"),
    step("queryMsgTraceById -i {traced0}", "Pub tracers 127.0.0.1 TIME …ms success",
         "Sub watchers 127.0.0.1 TIME …ms success", again=True, varies="(Pub|Sub) .*"),
    step("queryMsgTraceById -i 7F0000010000000000000000FFFFFFFF", code=208),
    step("queryMsgByKey -t RMQ_SYS_TRACE_TOPIC -k traced", "ID 0 0 …", "ID 0 1 …", varies=INDEXED),
    step("+leave watchers"),
)  # fmt: skip

TRANSACTIONS = (
    step("+transact banks Kinds good COMMIT_MESSAGE", save="good"),
    step("+transact banks Kinds bad ROLLBACK_MESSAGE", save="bad"),
    # A producer does not wait for the end of its transaction.
    step("topicStatus -t Kinds", "broker-a 0 0 2 TIME", again=True, varies=RATES),
    step("topicStatus -t RMQ_SYS_TRANS_HALF_TOPIC", "broker-a 0 0 2 TIME", varies=RATES),
    step("topicRoute -l -t RMQ_SYS_TRANS_HALF_TOPIC",
         "DefaultCluster broker-a {0=BROKER} 1 1 6"),
    step("queryMsgByUniqueKey -t Kinds -i {good0}", "Keys: [good]", "Queue Offset: 1",
         "System Flag: 8", "Properties: {… PGROUP=banks, … TRAN_MSG=true, …}", varies=PLACE),
    step("queryMsgByUniqueKey -t Kinds -i {bad0}", code=208),
    step("queryMsgByKey -t Kinds -k good", "ID 0 1 …", varies=INDEXED),
    step("queryMsgByKey -t Kinds -k bad", code=208),
    step("queryMsgByKey -t RMQ_SYS_TRANS_HALF_TOPIC -k bad", "ID 0 1 …", varies=INDEXED),
    step("producerConnection -g banks -t Kinds", "0001 CLIENT@banks ADDRESS JAVA VERSION"),
)  # fmt: skip

TIMERS = (
    step("+delay clocks Kinds later 600000", save="later"),
    step("+delay clocks Kinds soon 1500", save="soon"),
    step("topicStatus -t rmq_sys_wheel_timer", "broker-a 0 0 2 TIME", varies=RATES),
    step("topicStatus -t Kinds", "broker-a 0 0 3 TIME", again=True, varies=RATES),
    step("queryMsgByUniqueKey -t Kinds -i {soon0}", "Keys: [soon]", "Queue Offset: 2",
         "Properties: {TIMER_OUT_MS=MS, … TIMER_ENQUEUE_MS=MS, … TIMER_DEQUEUE_MS=MS, "
         "REAL_TOPIC=Kinds, REAL_QID=0}", varies=PLACE),
    step("queryMsgByUniqueKey -t Kinds -i {later0}", code=208),
    step("queryMsgByUniqueKey -t rmq_sys_wheel_timer -i {later0}", "Keys: [later]",
         "Queue Offset: 0", "Properties: {TIMER_OUT_MS=MS, … REAL_TOPIC=Kinds, REAL_QID=0}",
         varies=PLACE),
    step("queryMsgByKey -t rmq_sys_wheel_timer -k later", "ID 0 0 …", varies=INDEXED),
    step("brokerStatus -b {broker}", "timerReadBehind : 0", "timerOffsetBehind : 0",
         "timerCongestNum : …", "timerEnqueueTps : …", "timerDequeueTps : …", again=True,
         varies=".*"),
)  # fmt: skip

POPS = (
    step("updateTopic -c {cluster} -t Pops -r 2 -w 2", "create topic to BROKER success."),
    step("sendMessage -t Pops -p one -b broker-a -i 0", "broker-a 0 SEND_OK ID"),
    step("sendMessage -t Pops -p two -b broker-a -i 1", "broker-a 1 SEND_OK ID"),
    step("setConsumeMode -b {broker} -t Pops -g poppers -m POP -q 2",
         "set consume mode to BROKER success.",
         "topic[Pops] group[poppers] consume mode[POP] popShareQueueNum[2]"),
    step("setConsumeMode -c {cluster} -t Pops -g poppers -m POP",
         "set consume mode to BROKER success.",
         "topic[Pops] group[poppers] consume mode[POP] popShareQueueNum[0]"),
    step("setConsumeMode -b {broker} -t Pops -g pullers -m PULL",
         "topic[Pops] group[pullers] consume mode[PULL] popShareQueueNum[0]"),
    step("setConsumeMode -b {broker} -t %RETRY%poppers -g poppers -m POP", code=16),
    step("setConsumeMode -b {broker} -t Missing -g poppers -m POP", code=17),
    step("+consume poppers Pops * POP"),
    step("+consumed poppers 2"),
    step("consumerProgress -g poppers", "Pops broker-a 0 1 1 0 0 TIME",
         "Pops broker-a 1 1 1 0 0 TIME", "Consume Diff Total: 0", "Consume Inflight Total: 0",
         again=True, varies=PROGRESS),
    step("consumerProgress", "poppers 1 VERSION PUSH CLUSTERING 0 0"),
    step("consumerConnection -g poppers", "CLIENT@poppers ADDRESS JAVA VERSION", "Pops *",
         "%RETRY%poppers *", "ConsumeType: CONSUME_PASSIVELY"),
    step("consumerStatus -g poppers", "1 CLIENT@poppers VERSION MS/CLIENT@poppers", "Rebalance OK"),
    step("brokerConsumeStats -b {broker}", "Pops poppers broker-a 0 1 1 0 TIME",
         varies="Orders .*|Kinds .*|%RETRY%.*|RMQ_SYS_TRANS.*|Diff Total.*"),
    step("+leave poppers"),
)  # fmt: skip

REMOVALS = (
    step("deleteSubGroup -c {cluster} -g buyers -r true",
         "delete subscription group [buyers] from broker [BROKER] in cluster [DefaultCluster] "
         "success."),
    step("getConsumerConfig -g buyers", absent=("groupName = …",)),
    step("consumerProgress -g buyers", code=17),
    step("deleteSubGroup -b {broker} -g nobody",
         "delete subscription group [nobody] from broker [BROKER] success."),
    step("+leave listeners"),
    step("deleteTopic -c {cluster} -t Orders",
         "delete topic [Orders] from cluster [DefaultCluster] success.",
         "delete topic [Orders] from NameServer success."),
    step("deleteTopic -c {cluster} -t Missing",
         "delete topic [Missing] from cluster [DefaultCluster] success."),
    step("topicRoute -t Orders", code=17),
    step("topicList", "Fresh", "Bills", absent=("Orders", "%RETRY%buyers")),
)  # fmt: skip

ACCESS_STEPS = (
    # Nobody, and somebody with a wrong password. NameServers let all in, here as there.
    step("+sign"),
    step("topicRoute -t TBW102", '"perm":7,'),
    step("brokerStatus -b {broker}", code=16),
    step("createUser -b {broker} -u mallory -p 12345678", code=16),
    step("updateTopic -b {broker} -t Mine", code=16),
    step("+sign root wrong"),
    step("brokerStatus -b {broker}", code=16),
    step("+sign nobody 12345678"),
    step("brokerStatus -b {broker}", code=16),
    # The super user.
    step("+sign root {password}"),
    step("updateTopic -c {cluster} -t Orders -r 1 -w 1", "create topic to BROKER success."),
    step("createUser -b {broker} -u alice -p 12345678 -t Normal", "create user to BROKER success."),
    step("listUser -b {broker}", "alice … Normal enable", "root … Super enable",
         absent=("mallory …",)),
    # A user without rights, and with few.
    step("+sign alice 12345678"),
    step("sendMessage -t Orders -p hello -b broker-a -i 0", absent=("… SEND_OK …",), code=16),
    step("+sign root {password}"),
    step("createAcl -b {broker} -s User:alice -r Topic:Orders -a Pub -d Allow",
         "create acl to BROKER success."),
    step("+sign alice 12345678"),
    step("sendMessage -t Orders -p hello -b broker-a -i 0", "broker-a 0 SEND_OK ID"),
    step("topicStatus -t Orders", code=16),
    step("deleteTopic -c {cluster} -t Orders", code=16),
    # Apache asks nobody for a right to this.
    step("updateBrokerConfig -b {broker} -k defaultTopicQueueNums -v 7", code=16, apache_code=0,
         varies=".*"),
    step("listUser -b {broker}", code=16),
    step("listAcl -b {broker}", code=16),
    step("+sign root {password}"),
    step("topicStatus -t Orders", "broker-a 0 0 1 TIME", varies=RATES),
)  # fmt: skip
"""In a cluster with access control: as whom the tool signs decides."""

ALL_STEPS = (*SERVERS, *TOPICS, *MESSAGES, *GROUPS, *CLIENTS, *RESETS, *BROKER, *NAMESERVER, *USERS,
        *TRACES, *TRANSACTIONS, *TIMERS, *POPS, *REMOVALS)  # fmt: skip
"""One after the other, in a fresh cluster."""
