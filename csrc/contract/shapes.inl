// The interpreter of lines (shapes.h), compiled once into each library.

#include "contract/contract.h"
#include "contract/operators.h"

#include <algorithm>
#include <cctype>
#include <limits>
#include <map>

namespace jagged_cuda {

constexpr int64_t Sizes::* kSizes[] = {&Sizes::B,  &Sizes::T,  &Sizes::Tq, &Sizes::Tk,   &Sizes::Tx,
                                       &Sizes::Ty, &Sizes::M,  &Sizes::N,  &Sizes::D,    &Sizes::Dv,
                                       &Sizes::H,  &Sizes::G,  &Sizes::R,  &Sizes::Hb,   &Sizes::Ht,
                                       &Sizes::Hp, &Sizes::Rt, &Sizes::Rp, &Sizes::elems};
const std::vector<std::string> kSizeNames = {"B",  "T",  "Tq", "Tk", "Tx",       "Ty", "M",
                                             "N",  "D",  "Dv", "H",  "G",        "R",  "Hb",
                                             "Ht", "Hp", "Rt", "Rp", "sum Lx*Ly"};

using Dtypes = std::vector<ScalarType>;
const std::map<std::string, Dtypes> kClasses = {
    {"float", {ScalarType::Float, ScalarType::Double, ScalarType::Half, ScalarType::BFloat16}},
    {"index", {ScalarType::Int, ScalarType::Long}},
    {"any",
     {ScalarType::Float, ScalarType::Double, ScalarType::Half, ScalarType::BFloat16,
      ScalarType::Int, ScalarType::Long, ScalarType::Short, ScalarType::Char, ScalarType::Byte,
      ScalarType::Bool}},
    {"int32", {ScalarType::Int}},
    {"int64", {ScalarType::Long}},
    {"bool", {ScalarType::Bool}}};

// "int32 or int64"
static std::string names_of(const Dtypes& dtypes) {
  std::string text = dtype_name(dtypes[0]);
  for (size_t i = 1; i < dtypes.size(); ++i) {
    text += (i + 1 < dtypes.size() ? ", " : " or ") + dtype_name(dtypes[i]);
  }
  return text;
}

// A size with what is added to it, a number, an argument, or a sign of a relation or `...`.
struct Word {
  enum { kSize, kNumber, kArgument, kSign } kind;
  int64_t value;  // or the size's or the argument's index
  int64_t plus;
  std::string text;
};

struct TensorRule {
  std::string name;
  size_t position;       // of the argument
  const Dtypes* dtypes;  // null: that of the argument `like`
  size_t like;
  bool accumulates;  // the dtype of sums of `like`
  std::vector<Word> dims;
};

struct Relation {
  std::vector<Word> words;
  std::optional<size_t> unless;
};

// The parts of `text` between separators, each followed by a space, that are not within brackets.
static std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> parts{""};
  int depth = 0;
  for (const char c : text) {
    depth += (c == '[') - (c == ']');
    if (c == separator && depth == 0) {
      parts.emplace_back();
    } else if (c != ' ' || !parts.back().empty()) {
      parts.back() += c;
    }
  }
  return parts;
}

static int64_t index_of(const std::vector<std::string>& names, const std::string& name) {
  const auto found = std::find(names.begin(), names.end(), name);
  return found == names.end() ? -1 : found - names.begin();
}

static bool has_size(const TensorRule& rule, int64_t size) {
  return std::any_of(rule.dims.begin(), rule.dims.end(), [&](const Word& dim) {
    return dim.kind == Word::kSize && dim.value == size && dim.plus == 0;
  });
}

// The state of one check.
struct Call {
  const Argument* arguments;
  Sizes sizes{};
  int device = -1;               // of the first tensor; -1: the CPU
  uint32_t known = 0;            // sizes that have occurred
  const Tensor* rest = nullptr;  // its last dimensions are `...`
  int64_t rest_dims = 0;

  bool knows(int64_t size) const { return known >> size & 1; }

  // Of a number, a size, or an integer. An integer may be None, and a size that of a tensor which
  // is.
  std::optional<int64_t> value_of(const Word& word) const {
    if (word.kind == Word::kArgument) return arguments[word.value].value;
    if (word.kind == Word::kSize && !knows(word.value)) return std::nullopt;
    return word.kind == Word::kSize ? sizes.*kSizes[word.value] : word.value;
  }
};

struct Contract::Line {
  std::string op;
  std::vector<std::string> names;  // of all arguments
  std::vector<TensorRule> rules;
  std::vector<Relation> relations;

  Word word_of(const std::string& text) const {
    const size_t plus = text.find(" + 1");
    const int64_t size = index_of(kSizeNames, text.substr(0, plus));
    if (size >= 0) return {Word::kSize, size, plus != std::string::npos, text};
    if (const int64_t i = index_of(names, text); i >= 0) return {Word::kArgument, i, 0, text};
    if (std::isdigit(text.back())) return {Word::kNumber, std::stoll(text), 0, text};
    if (index_of({"...", "<=", ">=", "==", "*", "%"}, text) < 0) {
      fail("jagged_cuda: in the line of " + op + " " + text + " is nothing that is known");
    }
    return {Word::kSign, 0, 0, text};
  }

  // name: class [dims]
  void add_rule(const std::string& text) {
    const size_t colon = text.find(':'), open = text.find('[');
    TensorRule rule{text.substr(0, colon), 0, nullptr, 0, false, {}};
    rule.position = static_cast<size_t>(word_of(rule.name).value);
    std::string name = text.substr(colon + 2, open - colon - 3);
    if (name.back() == '?') name.pop_back();
    rule.accumulates = name.back() == ')';
    if (rule.accumulates) name = name.substr(4, name.size() - 5);
    if (const auto found = kClasses.find(name); found != kClasses.end()) {
      rule.dtypes = &found->second;
    } else {
      rule.like = static_cast<size_t>(word_of(name).value);
    }
    for (const std::string& dim : split(text.substr(open + 1, text.size() - open - 2), ',')) {
      rule.dims.push_back(word_of(dim));
    }
    rules.push_back(rule);
  }

  void add_relation(const std::string& text) {
    Relation relation;
    const size_t unless = text.find(" unless ");
    for (const auto& word : split(text.substr(0, unless), ' ')) {
      relation.words.push_back(word_of(word));
    }
    if (unless != std::string::npos) relation.unless = word_of(text.substr(unless + 8)).value;
    relations.push_back(relation);
  }

  // With numbers for the sizes that `call` knows, if it is given.
  static std::string shape_of(const TensorRule& rule, const Call* call) {
    std::string text;
    for (const Word& dim : rule.dims) {
      if (dim.kind == Word::kSign && call && call->rest) {
        for (int64_t i = call->rest->dim() - call->rest_dims; i < call->rest->dim(); ++i) {
          text += ", " + std::to_string(call->rest->size(i));
        }
      } else if (dim.kind == Word::kSize && call && call->knows(dim.value)) {
        text += ", " + std::to_string(call->sizes.*kSizes[dim.value] + dim.plus);
      } else {
        text += ", " + dim.text;
      }
    }
    return "[" + text.substr(std::min<size_t>(2, text.size())) + "]";
  }

  void check_tensor(const TensorRule& rule, const Tensor& tensor, Call& call) const {
    const auto shape = tensor.sizes();
    const int64_t num_dims = static_cast<int64_t>(shape.size());
    const bool has_rest = rule.dims.back().kind == Word::kSign;
    const int64_t leading = static_cast<int64_t>(rule.dims.size()) - has_rest;
    const auto check_shape = [&](bool fits) {
      if (!fits) fail_argument(op, rule.name, shape_of(rule, &call), shape_text(tensor));
    };
    check_shape(has_rest ? num_dims >= leading : num_dims == leading);
    const ScalarType dtype = tensor.scalar_type();
    if (rule.dtypes == nullptr) {
      ScalarType expected = call.arguments[rule.like].tensor->scalar_type();
      if (rule.accumulates) expected = sum_dtype(expected);
      if (dtype != expected) fail_argument(op, rule.name, dtype_name(expected), dtype_name(dtype));
    } else if (std::find(rule.dtypes->begin(), rule.dtypes->end(), dtype) == rule.dtypes->end()) {
      fail_argument(op, rule.name, names_of(*rule.dtypes), dtype_name(dtype));
    }
    const Tensor& first = *call.arguments[rules[0].position].tensor;
    const int device = tensor.is_cpu() ? -1 : tensor.get_device_index();
    if (&tensor == &first) call.device = device;
    if (device != call.device) {
      fail_argument(op, rule.name, "on " + device_text(first), "on " + device_text(tensor));
    }
    for (int64_t i = 0; i < leading; ++i) {
      const Word& dim = rule.dims[i];
      if (dim.kind == Word::kNumber) {
        check_shape(shape[i] == dim.value);
        continue;
      }
      int64_t& size = call.sizes.*kSizes[dim.value];
      check_shape(call.knows(dim.value) ? shape[i] == size + dim.plus : shape[i] >= dim.plus);
      size = shape[i] - dim.plus;
      call.known |= uint32_t{1} << dim.value;
    }
    if (!has_rest) return;
    if (call.rest == nullptr) {
      call.rest = &tensor;
      call.rest_dims = num_dims - leading;
      call.sizes.rest = 1;
      for (int64_t i = leading; i < num_dims; ++i) call.sizes.rest *= shape[i];
    }
    const auto rest = call.rest->sizes();
    check_shape(num_dims - leading == call.rest_dims &&
                std::equal(shape.begin() + leading, shape.end(), rest.end() - call.rest_dims));
  }

  // Compares products and remainders of what the words say, from left to right.
  static bool holds(const Relation& relation, const Call& call) {
    if (relation.unless && call.arguments[*relation.unless].tensor != nullptr) return true;
    const std::vector<Word>& words = relation.words;
    int64_t last = 0;
    for (size_t i = 0; i < words.size(); i += 2) {
      const char comparison = i > 0 ? words[i - 1].text[0] : 0;
      std::optional<int64_t> side = call.value_of(words[i]);
      if (!side) return true;
      const char sign = i + 1 < words.size() ? words[i + 1].text[0] : 0;
      if (sign == '*' || sign == '%') {
        const std::optional<int64_t> other = call.value_of(words[i += 2]);
        if (!other) return true;
        if (sign == '*' && __builtin_mul_overflow(*side, *other, &*side)) {
          side = std::numeric_limits<int64_t>::max();
        }
        if (sign == '%' && *other != 0) *side %= *other;  // of 0, only 0 is a multiple
      }
      if (comparison == '<' && last > *side) return false;
      if (comparison == '>' && last < *side) return false;
      if (comparison == '=' && last != *side) return false;
      last = *side;
    }
    return true;
  }

  // Names what the relation bounds: an integer, or the first argument that has this size. A size
  // that this argument does not have is given as a number.
  [[noreturn]] void fail_relation(const Relation& relation, const Call& call) const {
    std::vector<Word> words = relation.words;
    const bool range = words[0].kind == Word::kNumber;
    const Word subject = words[range ? 2 : 0];
    const TensorRule* owner = nullptr;
    if (subject.kind == Word::kSize) {
      owner = &*std::find_if(rules.begin(), rules.end(),
                             [&](const TensorRule& rule) { return has_size(rule, subject.value); });
      for (Word& word : words) {
        if (word.kind == Word::kSize && !has_size(*owner, word.value)) {
          word.text = std::to_string(call.sizes.*kSizes[word.value]);
        }
      }
    }
    std::string text;
    for (size_t i = 1; i < words.size(); ++i) text += (i > 1 ? " " : "") + words[i].text;
    if (range) text = "from " + words[0].text + " to " + words[4].text;
    if (words[1].text == "%") text = "a multiple of " + words[2].text;
    if (relation.unless) text += " unless " + names[*relation.unless] + " is given";
    if (owner == nullptr) {
      const int64_t value = *call.arguments[subject.value].value;
      fail_argument(op, subject.text, text, std::to_string(value));
    }
    fail_argument(op, owner->name, shape_of(*owner, nullptr) + " with " + subject.text + " " + text,
                  shape_text(*call.arguments[owner->position].tensor));
  }
};

Contract::Contract(const char* op) {
  Line line{op, {}, {}, {}};
  for (const Operator& known : kOperators) {
    const std::string schema = known.schema, text = known.line;
    const size_t open = schema.find('(');
    if (schema.substr(0, open) != op) continue;
    for (auto& argument : split(schema.substr(open + 1, schema.find(')') - open - 1), ',')) {
      argument.resize(std::min(argument.size(), argument.find('=')));
      line.names.push_back(argument.substr(argument.rfind(' ') + 1));
    }
    const auto parts = split(text.substr(0, text.find(" -> ")), ';');
    for (const auto& rule : split(parts[0], ',')) line.add_rule(rule);
    for (size_t i = 1; i < parts.size(); ++i) line.add_relation(parts[i]);
  }
  line_ = std::make_shared<Line>(line);
}

Sizes Contract::check(std::initializer_list<Argument> arguments) const {
  Call call{arguments.begin()};
  if (arguments.size() != line_->names.size()) fail(line_->op + ": wrong number of arguments");
  for (const TensorRule& rule : line_->rules) {
    const Tensor* tensor = call.arguments[rule.position].tensor;
    if (tensor != nullptr) line_->check_tensor(rule, *tensor, call);
  }
  for (const Relation& relation : line_->relations) {
    if (!line_->holds(relation, call)) line_->fail_relation(relation, call);
  }
  return call.sizes;
}

}  // namespace jagged_cuda
