"""Runtimes that run the target model: one file a runtime, and the slot cache they share."""
