# SPDX-License-Identifier: Apache-2.0
"""The chat prompts of the demo: short questions that a model of 135M can answer."""

DEMO_PROMPTS: tuple[str, ...] = (
    "What is the capital of France, and what is the city known for?",
    "Explain in simple words why the sky looks blue.",
    "Write a short story about a lighthouse keeper and a lost seagull.",
    "List five tips for someone who wants to sleep better.",
    "How do plants turn sunlight into food?",
    "Write a Python function that returns the larger of two numbers.",
    "Give me a simple recipe for vegetable soup.",
    "Write a polite email asking a colleague to move a meeting to Friday.",
    "What is the difference between weather and climate?",
    "Summarise the story of Little Red Riding Hood in three sentences.",
    "A train travels 60 miles in one hour. How far does it travel in three hours?",
    "Write a four-line poem about the first snow of winter.",
)
