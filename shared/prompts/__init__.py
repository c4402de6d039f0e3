"""From rows to the text that a model reads: templates, in a process of their own (`templates.py`,
`inside_templates.py`), and the chat template and tokenizer of a model's folder (`reading.py`)."""
