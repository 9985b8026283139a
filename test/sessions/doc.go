// Package sessions walks a table: in every state that an engine's session or
// request can be in, the engine does everything that an engine must not do, or
// dies. Each cell says what it is answered; after each the node serves another
// engine with the right bytes, and when both have gone nothing of them is left.
//
// The server, the node and the lanes are the real ones, over a real socket; the
// tier is tier/memtier, whose calls the states hold. It is tests only.
package sessions
