"""The demo that means something without the internet: a small base model of our own and a support-ticket task."""
