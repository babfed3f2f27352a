"""`penstock demo`: a broker that is killed without losing messages, then two Spark pipelines."""
