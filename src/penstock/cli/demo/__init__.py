"""`penstock demo`: messages that survive a killed broker, then two pipelines on Spark."""
