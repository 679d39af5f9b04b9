"""What clients may send: one file a route's form, each field with its bounds; the schema of `/openapi.json`."""
