"""What is true, and what happens next. attrs, numpy and rpds-py; never torch."""
