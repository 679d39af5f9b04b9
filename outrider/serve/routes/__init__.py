"""One file a family of routes; each turns a form into requests, and what comes into the answer its clients know."""
