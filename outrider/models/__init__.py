"""Getting a model ready: loading by any name, the embedded model, shared first layers, and what is installed."""

from outrider.models.load import LoadedModel, check_source, load_model, load_tokenizer
from outrider.models.truncate import first_layers
from outrider.models.vocabulary import same_vocabulary

__all__ = ["LoadedModel", "check_source", "first_layers", "load_model", "load_tokenizer", "same_vocabulary"]
