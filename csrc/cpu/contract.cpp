#include "contract/shapes.inl"
