"""etcd as the store of controllers: an HTTP client, states, leases, a watch."""
