"""Topics as Spark tables and streams: format `penstock`, its Arrow columns, sink and pipelines.

Needs the extra `spark`. Nothing is imported here: Spark's Python workers load this
package for every task.
"""
