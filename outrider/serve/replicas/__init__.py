"""Several engines behind one front, kept alive by Ray Serve: texts that begin alike go to the same one, and a request
whose engine dies goes on in another. Extra: `[ray]`.
"""
