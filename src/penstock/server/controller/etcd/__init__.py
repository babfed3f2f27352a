"""etcd as the store of controllers: HTTP client, states, reports of living replicas, watch."""
