"""The best that any exact rule could do with a drafter, and what each rule does."""
