"""The execution planner: turns an application into a proven plan, without Spark. Its only I/O:
facts of streams.
"""
