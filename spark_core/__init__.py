"""The domain of spark-vllm, free of Pulumi: what a node, a fabric, an image, weights and a serving group should be,
how each is observed over a :class:`~spark_core.transport.base.Transport`, what differs, how it is changed and undone.
"""
