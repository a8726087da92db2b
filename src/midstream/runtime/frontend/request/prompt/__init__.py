"""Prompts: chats, text offsets, inputs."""
