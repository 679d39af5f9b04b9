"""What clients get: choices as they grow, usage and timings, and server-sent events."""
