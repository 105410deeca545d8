"""Parts of examples/lora.py, for programs of your own, too: adapters and dialogues."""
