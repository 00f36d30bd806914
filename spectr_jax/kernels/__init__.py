"""Operations whose fastest form depends on the platform, each beside the plain form that defines its result."""
