"""A traced generation as a picture: the document that a page reads, the page's files, and one file that holds both."""

from outrider.explain.document import document
from outrider.explain.picture import Explanation, explain, page_files, single_file, traced

__all__ = ["Explanation", "document", "explain", "page_files", "single_file", "traced"]
