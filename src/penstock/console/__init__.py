"""The web console: pages and a JSON API over `penstock.client.admin`."""
