"""What lies on disk: retrieval stores over a corpus, what drafters learnt, files of prompts."""
