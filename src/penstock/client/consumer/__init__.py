"""Push consumers: rebalance, pulling, offsets."""
