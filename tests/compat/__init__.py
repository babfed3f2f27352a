"""Tests against the real RocketMQ: its classes, its clients, its servers.

- maven: builds the programs of the directory ``java`` and runs them.
- golden: bytes made by RocketMQ's classes (stored in tests/fixtures/golden), and RocketMQ's
  decoders for bytes of ours. golden_inputs and make_golden regenerate the former.
- apache: Apache's name server and broker as child processes.
- clients: RocketMQ's producer, consumer, key query and admin tool, against any server.
- java_session: one JVM that drives many real clients by commands, for the tests of our servers.
- penstock: our name server, broker and `penstock up` as child processes.
- clusters: which servers a test runs against, ours or (PENSTOCK_COMPAT_PEER=apache) Apache's.
- golang: Apache's Go client, built from the directory ``go`` and steered by commands.
- etcd_cluster: three members of etcd as child processes, built from the directory ``etcd``.
- mqadmin_*: the admin tool's commands, their facts, and the comparison with Apache.
- reading: everything in a topic, read by a session.

All of it needs Java 17 and Maven, except reading the stored golden bytes, and Go for golang and
etcd_cluster.
"""
