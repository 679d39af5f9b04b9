"""The server: HTTP routes that clients of other servers know, in front of an engine; thin, no decoding logic.

`link` is what stands between the two: what the front asks of an engine, in this process or in another one.
"""
